"""Asynchronous reinforcement learning for language models.

Names are resolved on first use, so that importing the package (or its configuration) needs neither torch nor vllm.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import AsyncGRPOConfig
    from slipstream.learner.trainer import AsyncGRPOTrainer
    from slipstream.rollout.loop import AsyncRolloutLoop
    from slipstream.rollout.types import Rollout, RolloutGroup, TurnRecord
    from slipstream.run_config import RunConfig

__version__ = "0.1.0"

_HOMES = {
    "AsyncGRPOConfig": "slipstream.config",
    "AsyncGRPOTrainer": "slipstream.learner.trainer",
    "AsyncRolloutLoop": "slipstream.rollout.loop",
    "Rollout": "slipstream.rollout.types",
    "RolloutGroup": "slipstream.rollout.types",
    "RunConfig": "slipstream.run_config",
    "TurnRecord": "slipstream.rollout.types",
}

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "AsyncRolloutLoop",
    "Rollout",
    "RolloutGroup",
    "RunConfig",
    "TurnRecord",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
