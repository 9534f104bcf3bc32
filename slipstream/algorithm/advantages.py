"""Advantages of a group of rollouts."""

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-8


def group_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standardise the rewards of one group (GRPO, arXiv 2402.03300), with the population standard deviation.

    Args:
        rewards: `(num_generations,)`; NaN where no source scored the rollout.

    Returns:
        `(num_generations,)`; 0 for a NaN reward, which is left out of mean and deviation.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    scored = ~np.isnan(rewards)
    advantages = np.zeros_like(rewards)
    if scored.any():
        values = rewards[scored]
        advantages[scored] = (values - values.mean()) / (values.std() + STD_EPSILON)
    return advantages


def carries_signal(rewards: NDArray[np.float64]) -> bool:
    """Whether a group is trained: at least two scored rewards, and not all equal."""
    scored = rewards[~np.isnan(rewards)]
    return len(scored) >= 2 and bool(np.any(scored != scored[0]))
