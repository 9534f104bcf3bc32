"""Reward functions that tests name in a configuration."""

from typing import Any


def low_bytes(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of even token ids: differs between almost any two rollouts of a random model."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]
