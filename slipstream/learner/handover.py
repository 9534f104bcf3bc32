"""From rank 0's plan to each rank's rows, and its word on what all ranks do next."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slipstream.learner.plan import Share, StepPlan, from_bytes

GO_ON, DELIVER = 0, 1
LEAVE = -1  # in place of the size of a share


class Handover:
    """Sends each rank its share of a step; nothing is planned, packed or pickled here.

    Args:
        group: a gloo group of all ranks whose timeout is longer than any wait for rollouts; None: there is one rank.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.leads: bool = group is None or dist.get_rank(group) == 0

    # ---- rank 0's word

    def give(self, word: int) -> None:
        """On rank 0: tell the others."""
        if self._group is not None:
            dist.broadcast(torch.tensor([word]), src=0, group=self._group)

    def take(self) -> int:
        """On any other rank: what rank 0 says. Blocks."""
        word = torch.empty(1, dtype=torch.int64)
        dist.broadcast(word, src=0, group=self._group)
        return int(word.item())

    def call_for_delivery(self) -> None:
        """On rank 0, while the others are in `receive` or `agree`: all deliver now."""
        self.give(DELIVER)

    def agree(self, deliver: Callable[[], None]) -> None:
        """On all ranks: go on together; until rank 0 gets here the others call `deliver` as often as it asks for it."""
        if self.leads:
            self.give(GO_ON)
            return
        while self.take() == DELIVER:
            deliver()

    # ---- steps

    def send(self, plan: StepPlan | None, leave: bool = False) -> Share | None:
        """On rank 0: give the others their shares, or the news that there is no step, or that all leave; rank 0's own."""
        if self._group is not None:
            self.give(GO_ON)
            shares = [None, *plan.shares[1:]] if plan else [None] * dist.get_world_size(self._group)
            none = LEAVE if leave else 0
            sizes = torch.tensor([none if share is None else len(share) for share in shares], dtype=torch.int64)
            dist.scatter(torch.empty(1, dtype=torch.int64), list(sizes.split(1)), src=0, group=self._group)
            tensors = [torch.frombuffer(share, dtype=torch.uint8) for share in shares if share is not None]
            sent = [dist.isend(tensor, rank, group=self._group) for rank, tensor in enumerate(tensors, 1)]
            for work in sent:
                work.wait()  # type: ignore[union-attr]  # None only outside the group
        return plan.shares[0] if plan else None

    def receive(self, deliver: Callable[[], None]) -> tuple[Share | None, bool]:
        """On any other rank: its share, or None where there is no step any more; and whether all leave. Blocks; see
        `agree` for `deliver`."""
        self.agree(deliver)
        size = torch.empty(1, dtype=torch.int64)
        dist.scatter(size, None, src=0, group=self._group)
        count = int(size.item())
        if count <= 0:
            return None, count == LEAVE
        data = torch.empty(count, dtype=torch.uint8)
        dist.recv(data, src=0, group=self._group)
        return from_bytes(data.numpy()), False
