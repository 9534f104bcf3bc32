"""How often the supervisor looks: no decision that comes again and again may keep it from pausing."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import tasks.supervise
from cluster.decide import Action, Decision, Kind, Observation, State
from cluster.profile import ClusterError
from cluster.recovery import DIED, Fault
from slipstream.config_file import dump_config
from slipstream.process import new_incarnation
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_json, write_atomic, write_json
from tasks.observe import ask_to_leave
from tasks.records import assign, read_faults
from tasks.supervise import Supervisor, at_once

TIMES = 5


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "run")
    config = RunConfig.model_validate({"model": {"name": "m"}, "data": {"source": "d.jsonl"}, "learner": {"gpus": 0}})
    write_atomic(folder.run_file, dump_config(config))
    folder.begin_attempt(None, 0)
    return folder


class Paced(Supervisor):
    """Is shown the same for ever; writes down its looks and pauses."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__(run, None, 0.0)
        self.done: list[str] = []

    def _look(self) -> Observation:
        self.done.append("look")
        return Observation(0.0)

    def sleep(self) -> None:
        self.done.append("pause")


def refuse(*_: object) -> None:
    raise ClusterError("no such partition")


@pytest.mark.parametrize("kind", [Kind.WAIT, Kind.LEAVE, Kind.START, Kind.STOP])
def test_what_is_decided_again_and_again_is_paused_after(
    kind: Kind, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that does not leave yet, a submission that is refused each time, a stop that does not take."""
    fault = Fault(0.0, 1, "learner", DIED, 0) if kind is Kind.STOP else None
    made: list[Decision] = []

    def decide(seen: Observation, policy: object, state: State) -> Decision:
        actions = (Action(kind, None if kind is Kind.WAIT else "learner"),)
        made.append(
            Decision(actions, "the same", state, "learner", fault)
            if len(made) < TIMES
            else Decision((Action(Kind.FINISH),), "it is over", state)
        )
        return made[-1]

    monkeypatch.setattr(tasks.supervise, "decide", decide)
    monkeypatch.setattr(tasks.supervise, "start_role", refuse)
    paced = Paced(run)
    outcome = paced._lead(SimpleNamespace(held=lambda: True))  # type: ignore[arg-type]
    assert outcome is not None
    assert paced.done.count("look") == TIMES + 1
    free = 1 if kind in (Kind.START, Kind.STOP) else 0
    assert paced.done.count("pause") == TIMES - free
    assert len(read_faults(run)) == (TIMES if free else 0), "each was carried out"


def test_a_job_that_was_stopped_is_started_again_without_a_pause() -> None:
    stop = Decision((Action(Kind.STOP, "server"),), "", State())
    start = Decision((Action(Kind.START, "server"),), "", State())
    assert at_once(stop, None)
    assert at_once(start, stop)
    assert not at_once(start, start)


def test_a_cancel_request_does_not_take_the_pauses_away(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An onlooker, or a leader whose storage stumbles, goes on looking until the run has ended."""
    write_json(run.cancel_file, {"who": "me", "why": "enough"})
    slept: list[float] = []
    monkeypatch.setattr(tasks.supervise.time, "sleep", slept.append)
    Supervisor(run, None, 30.0).sleep()
    assert slept == [tasks.supervise.TICK_S]


def test_the_learner_is_told_once(run: RunFolder) -> None:
    incarnation = new_incarnation()
    assign(run, 1, learner=incarnation)
    job = SimpleNamespace(incarnation=incarnation)
    ask_to_leave(run, job, "first", 1.0)  # type: ignore[arg-type]
    ask_to_leave(run, job, "second", 2.0)  # type: ignore[arg-type]
    assert read_json(run.leave_file(incarnation))["why"] == "first"
