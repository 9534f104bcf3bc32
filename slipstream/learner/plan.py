"""What one optimizer step trains on, and each rank's share of it."""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slipstream.packing.planner import MicroBatch
from slipstream.packing.sample import Sample
from slipstream.packing.trie import Row, pack

Share = list[dict[str, Any]]  # one rank's micro-batches of a step


@dataclass
class PlannedMicroBatch:
    """Rows of one micro-batch, one per rank, and the trained tokens over all of them."""

    rows: list[Row]
    num_tokens: int
    imbalance: float

    @cached_property
    def num_rows(self) -> int:
        """Rows that hold samples."""
        return sum(row.num_samples > 0 for row in self.rows)


@dataclass
class StepPlan:
    """What one optimizer step trains on; `micro_batches` may be fewer than configured at the end of the data.

    Attributes:
        shares: each rank's part: rank 0's as it is, the others' as bytes. Empty until `prepare`.
    """

    micro_batches: list[PlannedMicroBatch]
    samples: list[Sample] = field(default_factory=list)
    shares: list[Any] = field(default_factory=list)

    @cached_property
    def rows(self) -> list[Row]:
        return [row for batch in self.micro_batches for row in batch.rows]

    @cached_property
    def num_forwarded(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @cached_property
    def num_trained(self) -> int:
        return sum(row.num_terms for row in self.rows)

    @cached_property
    def attention_pairs(self) -> int:
        """Pairs of a token and one that it attends to."""
        return sum(int(row.position_ids.sum()) + row.num_tokens for row in self.rows)

    @cached_property
    def cost(self) -> int:
        """Tokens that the step takes off what is outstanding."""
        return sum(sample.cost for sample in self.samples)

    @cached_property
    def oldest_versions(self) -> dict[int, list[int]]:
        """Of each prompt's samples in the step."""
        found: dict[int, list[int]] = {}
        for sample in self.samples:
            found.setdefault(sample.number, []).append(sample.oldest_version)
        return found

    @cached_property
    def queued(self) -> tuple[float, int]:
        """When the samples were put into the queue, on average, and of how many that is known."""
        times = [sample.queued_at for sample in self.samples if sample.queued_at]
        return (sum(times) / len(times), len(times)) if times else (0.0, 0)

    def prepare(self, ranks: int, accumulation: int) -> None:
        """Do all that does not change any more, so that the training thread need not."""
        shares = [share_of(self.micro_batches, rank, accumulation) for rank in range(ranks)]
        self.shares = [shares[0], *map(to_bytes, shares[1:])]
        for name in ("rows", "num_forwarded", "num_trained", "attention_pairs", "cost", "oldest_versions", "queued"):
            getattr(self, name)


def make_plan(batches: Sequence[MicroBatch]) -> StepPlan:
    """The rows of micro-batches that are filled."""
    planned: list[PlannedMicroBatch] = []
    samples: list[Sample] = []
    for batch in batches:
        batch.spread()
        rows = batch.pack()
        planned.append(PlannedMicroBatch(rows, sum(row.num_terms for row in rows), batch.imbalance()))
        samples += [sample for held in batch.rows for sample in held]
    return StepPlan(planned, samples)


def share_of(batches: Sequence[PlannedMicroBatch], rank: int, accumulation: int) -> Share:
    """A rank's micro-batches of a step.

    There are always `accumulation` of them: a last, shorter step is filled up with rows without loss terms, and
    `num_micro_batches` says how many count.
    """
    counted = [
        {
            "row": batch.rows[rank],
            "num_tokens": batch.num_tokens,
            "num_rows": batch.num_rows,
            "num_micro_batches": len(batches),
        }
        for batch in batches
    ]
    filler = {"row": pack([]), "num_tokens": 1, "num_rows": 1, "num_micro_batches": len(batches)}
    return counted + [filler] * (accumulation - len(batches))


def to_bytes(share: Share) -> memoryview:
    """Whole arrays, little else; writable, so that a tensor can be made of it without a copy."""
    buffer = io.BytesIO()
    pickle.dump(share, buffer, protocol=5)
    return buffer.getbuffer()


def from_bytes(data: Any) -> Share:
    share: Share = pickle.loads(data)
    return share
