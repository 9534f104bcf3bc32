"""The run's deadlines end a phase before a library's time-out does: those name the phase, these break a group apart."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.config_file import parse_config
from slipstream.config_section import MOST_SECONDS
from slipstream.learner.main import trainer_arguments
from slipstream.learner.nodes import torchrun_arguments
from slipstream.learner.trainer import WAIT_FOR_ROLLOUTS
from slipstream.nodes import Place
from slipstream.run_config import LearnerSection, RunConfig
from slipstream.run_folder import RunFolder
from tasks.observe import policy_of

DEADLINES = ("startup_timeout", "step_timeout", "sync_timeout", "save_timeout")
LONGEST = next(m.le for m in LearnerSection.model_fields["step_timeout"].metadata if hasattr(m, "le"))


def arguments(config: RunConfig) -> dict:
    return trainer_arguments(config, RunFolder(Path("r")), 1, {"url": "http://h:1"}, has_gpu=False)


def meeting(config: RunConfig) -> float:
    words = torchrun_arguments(config, RunFolder(Path("r")), Place(0, 2, "127.0.0.1", "aa"))
    return float(next(word for word in words if "timeout=" in word).rpartition("timeout=")[2])


# the supervisor's deadlines of phases in which a library waits, and how long that waits
PAIRS: list[tuple[str, tuple[str, ...], Callable[[RunConfig], float]]] = [
    ("ddp_timeout", ("learner_startup_s", "step_s", "sync_s", "save_s"), lambda c: arguments(c)["ddp_timeout"]),
    ("rendezvous", ("learner_startup_s",), meeting),
    (
        "handover",
        ("learner_startup_s", "step_s", "sync_s", "save_s"),
        lambda c: WAIT_FOR_ROLLOUTS.total_seconds(),
    ),
]


@pytest.mark.parametrize("seconds", [None, 0.5, 7200.0, LONGEST])
@pytest.mark.parametrize("key", DEADLINES)
def test_every_deadline_comes_before_the_librarys(key: str, seconds: float | None) -> None:
    learner = {} if seconds is None else {key: seconds}
    config = parse_config({"model": {"name": "m"}, "data": {"source": "d"}, "learner": learner})
    policy = policy_of(config)
    for name, deadlines, library in PAIRS:
        for deadline in deadlines:
            assert getattr(policy, deadline) < library(config), (name, deadline)
        assert library(config) <= MOST_SECONDS, name  # more does not fit into a library's milliseconds


def test_calls_to_the_server_have_the_time_out_that_was_asked_for() -> None:
    """They are ours, and made again: one that nobody answers must not hold a delivery up until the run's deadline."""
    config = parse_config({"model": {"name": "m"}, "data": {"source": "d"}, "trainer": {"vllm_server_timeout": 10.0}})
    assert arguments(config)["vllm_server_timeout"] == 10.0
