"""Samples and groups for tests of packing and of the learner's policies."""

from collections.abc import Sequence

import numpy as np

from slipstream.packing.sample import NOT_GENERATED, Sample
from slipstream.rollout.types import GroupResult


def make_sample(
    prompt: Sequence[int], completion: Sequence[int], *, number: int = 0, version: int = 0, advantage: float = 1.0
) -> Sample:
    """One sample whose whole completion is trained; no head."""
    length = len(prompt) + len(completion)
    trained = np.arange(length) >= len(prompt)
    return Sample(
        input_ids=np.array([*prompt, *completion], np.int32),
        trained=trained,
        logprobs=np.where(trained, -0.5, 0).astype(np.float32),
        versions=np.where(trained, version, NOT_GENERATED).astype(np.int32),
        head_ids=np.zeros((len(completion), 0), np.int32),
        head_logprobs=np.zeros((len(completion), 0), np.float32),
        advantage=advantage,
        number=number,
    )


def make_result(number: int, samples: list[Sample], length: int, dropped: dict[str, int] | None = None) -> GroupResult:
    """What the rollout process says about prompt `number` of a dataset of `length`."""
    epoch, position = divmod(number, length)
    return GroupResult(
        number=number,
        epoch=epoch,
        position=position,
        row_index=position,
        samples=samples,
        dropped=dropped or {},
        cost=sum(sample.cost for sample in samples),
    )
