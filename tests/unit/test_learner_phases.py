"""Deadlines and leaving depend on the phase that rank 0 says: each one is known, and said to be before or in training."""

import re
from pathlib import Path

import pytest

from slipstream.process import STARTING
from tasks.observe import LOADING, OVER, read_beat

LEARNER = Path(__file__).resolve().parents[2] / "slipstream" / "learner"
WORKING = {"delivering weights", "waiting for rank 0", "waiting for rollouts", "training", "saving", "evaluating"}


def test_every_phase_is_of_one_kind() -> None:
    text = "\n".join(path.read_text() for path in sorted(LEARNER.glob("*.py")))
    said = set(re.findall(r"phase[(=]\"([^\"]+)\"", text))
    assert "checking the ranks" in said
    assert said - STARTING - WORKING - OVER == set()
    assert not STARTING & WORKING


@pytest.mark.parametrize("phase", sorted(LOADING))
def test_a_learner_that_loads_does_not_train_yet(phase: str) -> None:
    assert not read_beat({"phase": phase, "step": 0}).training
    assert read_beat({"phase": phase, "step": 3}).training


@pytest.mark.parametrize("phase", sorted(WORKING - LOADING))
def test_a_learner_that_works_trains(phase: str) -> None:
    assert read_beat({"phase": phase, "step": 0}).training
