"""What becomes of each prompt's group in the doubles: a hash of its number, so that a plan can count on it. Pure."""

import zlib
from math import ceil

WHOLE, ALL_ALIKE, ONE_FAILED, GOOD = "whole", "alike", "one failed", "good"


def fate(number: int) -> str:
    """WHOLE: the prompt itself is dropped; ALL_ALIKE: no signal; ONE_FAILED: one rollout fails; GOOD: all are trained."""
    draw = zlib.crc32(str(number).encode()) % 10
    return {0: WHOLE, 1: ALL_ALIKE, 2: ONE_FAILED}.get(draw, GOOD)


def step_size(group: int) -> int:
    """Samples in a step: one more than a group has, so that steps split groups."""
    return group + 1


def num_steps(prompts: int, group: int) -> int:
    """Optimizer steps of a run over so many prompts, where nothing gets too old."""
    samples = {WHOLE: 0, ALL_ALIKE: 0, ONE_FAILED: group - 1, GOOD: group}
    return ceil(sum(samples[fate(number)] for number in range(prompts)) / step_size(group))
