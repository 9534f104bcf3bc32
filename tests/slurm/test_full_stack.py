"""The real server, learner, supervisor and flow on the SLURM bed, as an unprivileged user, under faults.

Starting a server takes most of the time, so the faults of a test come one after the other in one run.
"""

import re
import time
from collections.abc import Callable, Iterator

import pytest

from slurm.bed import Bed
from tests.full_stack import FullRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.integration, pytest.mark.timeout(1200)]

PACE_S = 0.25
START_S = 400.0


@pytest.fixture
def new_run(bed: Bed, request: pytest.FixtureRequest) -> Iterator[Callable[..., FullRun]]:
    """Makes runs; nothing of them is left afterwards."""
    made: list[FullRun] = []

    def make(**settings: object) -> FullRun:
        name = re.sub(r"\W+", "-", request.node.name)[:40]
        made.append(FullRun(bed, f"{name}-{time.time_ns() % 10**9}", **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for run in made:
        run.close()


def finish(run: FullRun, code: int | None = None) -> None:
    """At full pace to its end, which is right."""
    run.pace(0)
    assert run.wait(run.started[-1]) == (0 if code is None else code), run.words()
    assert run.outcome()["kind"] == "finish"
    assert run.findings() == []
    assert run.left() == []


def steps(run: FullRun) -> list[int]:
    return [line["step"] for line in run.run.merged_records("metrics.jsonl") if "loss" in line]


def learner_restarted(run: FullRun, attempt: int, what: str) -> None:
    """A new attempt has trained a step, from a checkpoint, and on the same server."""
    run.reach(1, START_S, attempt)
    assert run.run.fence(attempt)["checkpoint"], f"{what}: nothing was resumed"
    run.reach(run.run.fence(attempt)["step"] + 1, START_S, attempt)


def test_the_server_a_rank_and_the_flow_are_killed_in_turn(new_run: Callable[..., FullRun]) -> None:
    run = new_run(prompts=240, pace_s=PACE_S)
    flow = run.train()
    run.reach(6, START_S)
    before = run.assigned()

    (engine,) = run.engine()
    engine.kill()
    until(lambda: run.assigned().get("server") not in (None, before["server"]), "another server is submitted")
    until(lambda: run.endpoint().get("incarnation") == run.assigned()["server"], "it is ready", START_S)
    run.reach(run.step + 3, START_S)
    after = run.assigned()
    assert (after["attempt"], after["learner"]) == (1, before["learner"]), "the learner went on"
    assert steps(run) == list(range(1, steps(run)[-1] + 1)), "no optimizer step was lost"

    run.ranks()[-1].kill()
    learner_restarted(run, 2, "a rank was killed")
    assert run.assigned()["server"] == after["server"], "the server was kept"
    before = run.assigned()

    run.kill(flow)
    run.wait(flow, 60)
    terms = run.terms
    run.reach(run.step + 3, led=False)  # the jobs go on
    run.command("resume", str(run.run.path))
    until(lambda: run.terms > terms, "somebody leads again")
    assert run.assigned() == before, "the jobs were adopted"
    finish(run)
    assert run.assigned() == before
    assert {fault["role"] for fault in run.faults()} == {"server", "learner"}
    assert len(run.faults()) == 2
