"""From the turns of a rollout to training sequences. Pure."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from slipstream.packing.sample import EMPTY, NOT_GENERATED, Sample
from slipstream.packing.trie import new_nodes, sorted_order
from slipstream.rollout.types import Rollout, TurnRecord


class _Growing:
    """A sequence while turns are appended to it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.trained: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.heads: list[dict[int, float]] = []
        self.candidates: list[Sequence[int]] = []  # of the trained tokens; an empty one is the whole vocabulary

    def context(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.trained += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [NOT_GENERATED] * len(ids)

    def output(self, turn: TurnRecord) -> None:
        count = len(turn.output_ids)
        mask = [True] * count if turn.output_mask is None else [bool(m) for m in turn.output_mask]
        if len(mask) != count:
            raise ValueError(f"output_mask has {len(mask)} entries for {count} output tokens")
        if any(mask) and len(turn.output_log_probs) != count:
            raise ValueError(f"output_log_probs has {len(turn.output_log_probs)} entries for {count} output tokens")
        heads = turn.output_sampler_logprobs or [{}] * count
        if len(heads) != count:
            raise ValueError(f"output_sampler_logprobs has {len(heads)} entries for {count} output tokens")
        candidates = turn.output_sampling_mask or [[]] * count
        if len(candidates) != count:
            raise ValueError(f"output_sampling_mask has {len(candidates)} entries for {count} output tokens")
        versions = turn.output_versions or [0] * count
        self.ids += turn.output_ids
        self.trained += mask
        self.logprobs += [p if m else 0.0 for p, m in zip(turn.output_log_probs or [0.0] * count, mask, strict=True)]
        self.versions += versions
        self.heads += [head for head, m in zip(heads, mask, strict=True) if m]
        self.candidates += [ids for ids, m in zip(candidates, mask, strict=True) if m]

    def finish(self) -> Sample:
        width = max((len(head) for head in self.heads), default=0)
        head_ids = np.full((len(self.heads), width), EMPTY, np.int32)
        head_logprobs = np.zeros((len(self.heads), width), np.float32)
        for i, head in enumerate(self.heads):
            for j, (token, logprob) in enumerate(head.items()):
                head_ids[i, j], head_logprobs[i, j] = token, logprob
        sample = Sample(
            input_ids=np.array(self.ids, np.int32),
            trained=np.array(self.trained, np.bool_),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            head_ids=head_ids,
            head_logprobs=head_logprobs,
            **self._candidate_arrays(),
        )
        sample.check()
        return sample

    def _candidate_arrays(self) -> dict[str, Any]:
        if not any(self.candidates):
            return {}
        lengths = np.array([0, *map(len, self.candidates)], np.int64)
        ids = np.fromiter(chain.from_iterable(self.candidates), np.int32, int(lengths.sum()))
        return {"candidate_ids": ids, "candidate_offsets": np.cumsum(lengths)}


def build_sequences(turns: Sequence[TurnRecord]) -> list[Sample]:
    """Reconcile turns: one whose prompt begins with the tokens held so far is appended, any other starts a new sequence.

    Every generated token is trained in exactly one sequence. Sequences without a trained token are left out.

    Raises:
        ValueError: a turn's lists do not match its output tokens.
    """
    sequences: list[_Growing] = []
    for turn in turns:
        current = sequences[-1] if sequences else None
        held = len(current.ids) if current else 0
        if current is None or turn.prompt_ids[:held] != current.ids:
            current, held = _Growing(), 0
            sequences.append(current)
        current.context(turn.prompt_ids[held:])
        current.output(turn)
    return [sequence.finish() for sequence in sequences if any(sequence.trained)]


def sort_out(
    outcomes: Sequence[Rollout | Exception],
) -> tuple[list[Rollout | None], list[list[Sample]], list[Exception]]:
    """The rollouts of a group, None for one that failed; their sequences; and why the others failed. One whose turns
    contradict themselves has failed too."""
    rollouts: list[Rollout | None] = []
    sequences: list[list[Sample]] = []
    failed: list[Exception] = []
    for outcome in outcomes:
        try:
            if isinstance(outcome, Exception):
                raise outcome
            sequences.append(build_sequences(outcome.turns))
            rollouts.append(outcome)
        except Exception as error:
            failed.append(error)
            sequences.append([])
            rollouts.append(None)
    return rollouts, sequences, failed


def assign_costs(samples: Sequence[Sample]) -> int:
    """Set each sample's `cost` to the nodes that it adds to its group's trie; their sum."""
    order = sorted_order([sample.input_ids for sample in samples])
    nodes = new_nodes([samples[i].input_ids for i in order])
    for index, count in zip(order, nodes, strict=True):
        samples[index].cost = count
    return sum(nodes)
