"""Deadlines and leaving depend on the phase that rank 0 says: each one is known, and said to be before or in training."""

import re
from pathlib import Path

import pytest

from slipstream.learner.reporter import Reporter
from slipstream.process import STARTING, Heartbeat
from slipstream.run_folder import RunFolder
from tasks.observe import OVER, read_beat
from tasks.observe import heartbeat as heartbeat_of

LEARNER = Path(__file__).resolve().parents[2] / "slipstream" / "learner"
WORKING = {"delivering weights", "waiting for rank 0", "waiting for rollouts", "training", "saving", "evaluating"}


def test_every_phase_is_of_one_kind() -> None:
    text = "\n".join(path.read_text() for path in sorted(LEARNER.glob("*.py")))
    said = set(re.findall(r"phase[(=]\"([^\"]+)\"", text))
    assert "checking the ranks" in said
    assert said - STARTING - WORKING - OVER == set()
    assert not STARTING & WORKING


@pytest.mark.parametrize("phase", sorted(STARTING | WORKING - {"training"}))
def test_before_its_first_step_a_learner_starts_whatever_step_it_resumes(phase: str) -> None:
    assert not read_beat({"phase": phase, "step": 3}).training
    assert read_beat({"phase": phase, "step": 3, "begun": True}).training


def test_what_rank_0_says_from_its_first_step_on(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "r")
    heartbeat = Heartbeat(run, "learner", 1, "aa")
    reporter = Reporter(run, 1, heartbeat)
    found = []
    for phase in ("waiting for rollouts", "training", "waiting for rollouts"):
        reporter.phase(phase, step=0)
        heartbeat.stop()  # writes
        found.append(read_beat(heartbeat_of(run, "learner")).training)
    assert found == [False, True, True]
