"""A sample: the tokens of a rollout that the loss is computed on, with their advantage."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

NOT_GENERATED = -1
EMPTY = -1


@dataclass
class Sample:
    """One training sequence.

    Attributes:
        input_ids: `(T,)` int32, prompt and completion.
        trained: `(T,)` bool, the tokens that the loss is computed on; never the first.
        logprobs: `(T,)` float32, the sampler's log-probability of each trained token, 0 elsewhere.
        versions: `(T,)` int32, the policy version that produced each generated token, `NOT_GENERATED` elsewhere.
        head_ids: `(L, K)` int32, the sampler's likeliest tokens at each of the `L` trained tokens, `EMPTY` where fewer.
        head_logprobs: `(L, K)` float32, their log-probabilities.
        candidate_ids, candidate_offsets: the sets that the trained tokens were drawn from under top-k / top-p / min-p:
            that of the `i`-th is `candidate_ids[offsets[i]:offsets[i + 1]]`, an empty one is the whole vocabulary;
            `(M,)` int32 and `(L + 1,)` int64. None: the whole vocabulary everywhere.
        advantage: of the rollout.
        number: of the prompt: `epoch * len(dataset) + position`.
        cost: tokens that count against the allowance: the group's shared prompt is counted once.
        reward, group_std: of the rollout and its group, for the metrics.
        queued_at: `time.monotonic()` when the sample was put into the rollout queue.
    """

    input_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    head_ids: NDArray[np.int32]
    head_logprobs: NDArray[np.float32]
    advantage: float = 0.0
    number: int = 0
    rollout_id: str = ""
    cost: int = 0
    reward: float = 0.0
    group_std: float = 0.0
    rewards_by_name: dict[str, tuple[float, float]] = field(default_factory=dict)
    queued_at: float = 0.0
    candidate_ids: NDArray[np.int32] | None = None
    candidate_offsets: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.trained))

    @property
    def oldest_version(self) -> int:
        """The policy version of the oldest trained token."""
        return int(self.versions[self.trained].min())

    def check(self) -> None:
        """Raise ValueError where the arrays contradict each other."""
        length, terms = len(self.input_ids), self.num_trained
        for name in ("trained", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"sample: {name} has {len(getattr(self, name))} entries for {length} tokens")
        if length and self.trained[0]:
            raise ValueError("sample: the first token is marked as trained, but nothing predicts it")
        if len(self.head_ids) != terms or self.head_ids.shape != self.head_logprobs.shape:
            raise ValueError(f"sample: head of shape {self.head_ids.shape} for {terms} trained tokens")
        if not np.isfinite(self.logprobs[self.trained]).all():
            raise ValueError("sample: a trained token has no finite log-probability of the sampler")
        self._check_candidates()

    def _check_candidates(self) -> None:
        ids, offsets = self.candidate_ids, self.candidate_offsets
        if ids is None or offsets is None:
            if ids is not None or offsets is not None:
                raise ValueError("sample: candidate_ids and candidate_offsets come together")
            return
        lengths = np.diff(offsets)
        if len(lengths) != self.num_trained or offsets[0] != 0 or offsets[-1] != len(ids) or (lengths < 0).any():
            raise ValueError(f"sample: candidate sets of {len(lengths)} tokens for {self.num_trained} trained tokens")
        owner = np.repeat(np.arange(len(lengths)), lengths)
        found = np.bincount(owner, ids == self.input_ids[self.trained][owner], minlength=len(lengths)) > 0
        if not (found | (lengths == 0)).all():
            raise ValueError("sample: a trained token is not among the candidates that it was drawn from")
