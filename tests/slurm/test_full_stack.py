"""The real server, learner, supervisor and flow on the SLURM bed, as an unprivileged user, under faults.

Starting a server takes most of the time, so the faults of a test come one after the other in one run.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator

import pytest

from cluster.recovery import LEFT, NODE
from slipstream.run_folder import read_json
from slurm.bed import Bed
from tests.full_stack import FullRun, until
from tests.secret_scan import leaks, places

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


@contextlib.contextmanager
def grace(bed: Bed, partition: str, seconds: int) -> Iterator[None]:
    """A preempted job of the partition has so many seconds between TERM and KILL."""
    bed.command("scontrol", "update", f"PartitionName={partition}", f"GraceTime={seconds}")
    try:
        yield
    finally:
        usual = bed.description.grace_seconds
        bed.command("scontrol", "update", f"PartitionName={partition}", f"GraceTime={usual}")


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
    run = new_run(prompts=300, pace_s=PACE_S)
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
    done = steps(run)
    assert done == list(range(1, len(done) + 1)), "no optimizer step was lost"

    run.ranks()[-1].kill()
    learner_restarted(run, 2, "a rank was killed")
    assert run.assigned()["server"] == after["server"], "the server was kept"
    before = run.assigned()

    run.pace(4 * PACE_S)  # so that it does not end before somebody leads it again
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


@pytest.mark.full
def test_the_learners_node_loses_power_is_preempted_and_its_time_runs_out(
    bed: Bed, new_run: Callable[..., FullRun]
) -> None:
    run = new_run(prompts=400, pace_s=PACE_S, profile={"partition": "spot", "time_limit": 20, "signal_lead": 30})
    run.supervise()
    run.reach(6, START_S)
    server, host = run.assigned()["server"], run.host("learner")

    bed.power_off(host)
    try:
        learner_restarted(run, 2, "its node lost power")
        assert run.host("learner") != host
    finally:
        bed.power_on(host)

    at, job = run.step, run.job("learner")
    elsewhere = [
        "sbatch",
        "-p",
        "main",
        "-w",
        run.host("learner"),
        "--exclusive",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 3",
    ]
    with grace(bed, "spot", 60):  # two TERMs with little between them would leave no time to save
        bed.run("login", elsewhere, user="bed2")
        learner_restarted(run, 3, "it was preempted")
    left_at(run, job.incarnation, at)

    at, job = run.step, run.job("learner")
    run.limit_time("learner", 35)
    learner_restarted(run, 4, "its time ran out")
    left_at(run, job.incarnation, at)

    assert run.assigned()["server"] == server, "the server was kept"
    finish(run)
    assert [fault["kind"] for fault in run.faults()] == [NODE, LEFT, LEFT]


def left_at(run: FullRun, incarnation: str, at: int) -> None:
    """The job has saved and left at a step after `at`, and what follows began there: nothing was redone."""
    record = read_json(run.run.exit_file("learner", incarnation)) or {}
    assert record["returncode"] == 0
    assert record["left"] >= at
    assert run.run.fence(run.attempt)["step"] == record["left"]


def test_a_person_stops_the_run_and_no_secret_is_where_others_could_read_it(
    bed: Bed, new_run: Callable[..., FullRun]
) -> None:
    planted = {"HF_TOKEN": "planted-1b7e-hub", "WANDB_API_KEY": "planted-5c20-tracker"}
    run = new_run(
        prompts=400,
        pace_s=PACE_S,
        cluster={"shape": "one_allocation"},
        profile={"keep_environment": ["HF_TOKEN"]},
        environment=planted,
    )
    flow = run.train()
    run.reach(3, START_S)
    secrets = {**planted, "the run's token": run.run.token_file.read_text().strip()}
    environment = run.ranks()[0].environ()
    assert environment["HF_TOKEN"] == planted["HF_TOKEN"], "what the profile names does reach the job"
    assert "WANDB_API_KEY" not in environment
    seen = places(bed, run)
    for what in ("vllm.entrypoints", "slipstream.learner.main", "batch script", "/spool/", "_0_log.out", "/logs/"):
        assert any(what in name or what.encode() in text for name, text in seen.items()), f"{what} was not looked at"
    assert leaks(seen, secrets) == []

    stop = run.command("stop", str(run.run.path), "--why", "enough")
    assert run.wait(stop, 120) == 0
    run.wait(flow, 120)
    assert run.left() == []
    assert (run.outcome()["kind"], run.attempt) == ("cancelled", 1)
    assert "enough" in run.outcome()["reason"]
    assert run.findings() == []
    assert leaks(places(bed, run), secrets) == []
    assert [path for path in (run.run.path / "secrets").rglob("*") if path.stat().st_mode & 0o077] == []
