"""slurm/train.sbatch on a real SLURM, with doubles of server and learner: two learner nodes, one server node."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.metrics.audit_records import audit_run
from slipstream.run_folder import RunFolder, read_json
from slurm.bed import Bed
from tests.chaos.drive import write_files
from tests.chaos.plan import Scenario
from tests.doubles.events import events_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]
CLI = [str(ROOT / ".venv" / "bin" / "python"), "-c", "from flows.cli.main import main; main()"]
PROMPTS = 150
PATIENCE_S = 300.0


class Batch:
    """One job of bed1."""

    def __init__(self, bed: Bed, folder: Path, plan: list[dict[str, Any]], *options: str, **settings: Any) -> None:
        given = {"step_s": 0.2, "prompts": PROMPTS, "storage": "", "profile": {}, **settings}
        scenario = Scenario(0, "one_allocation", 2, 1, 1, epochs=1, save_steps=5, steps=0, injections=(), **given)
        self.bed, self.folder = bed, folder
        config = write_files(folder, scenario)
        (folder / "runs" / "fault-plan.json").write_text(json.dumps(plan))
        script = folder / "train.sbatch"
        script.write_text(
            (ROOT / "slurm" / "train.sbatch").read_text().replace("-m tasks.batch", "-m tests.doubles.batch")
        )
        bed.run("login", ["chown", "-R", "bed1", str(folder)])
        options = ("--nodes=3", "--gpus-per-node=1", "--time=10", f"--output={folder}/job.log", *options)
        command = ["sbatch", "--parsable", *options, str(script), str(config)]
        self.id = bed.run("login", command, user="bed1", cwd=str(ROOT)).strip()
        self.run = RunFolder(folder / "runs" / f"run-job{self.id}")

    def field(self, name: str) -> str:
        text = self.bed.command("scontrol", "show", "job", "-o", self.id)
        return text.split(f" {name}=")[1].split()[0]

    def log(self) -> str:
        path = self.folder / "job.log"
        return path.read_text() if path.exists() else ""

    def wait_step(self, step: int) -> None:
        def reached() -> bool:
            if self.field("JobState") not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                raise AssertionError(self.log())
            return any(e["event"] == "step" and e["step"] >= step for e in events_of(self.run))

        wait_until(reached, f"step {step}")

    def wait_state(self, state: str) -> None:
        wait_until(lambda: self.field("JobState") == state, f"{state}; {self.log()}", PATIENCE_S)

    def events(self) -> str:
        """What leaders and onlookers of the run have said."""
        return "".join(path.read_text() for path in self.run.path.glob("records/a*/supervisor.jsonl"))

    def cli(self, *words: str) -> str:
        return self.bed.run("login", [*CLI, *words, str(self.run.path)], user="bed1", cwd=str(ROOT))

    def finished(self) -> None:
        self.wait_state("COMPLETED")
        audit = audit_run(self.run)
        assert (audit.findings, audit.finished, audit.settled) == ((), True, PROMPTS), self.log()
        assert (read_json(self.run.path / "outcome.json") or {})["kind"] == "finish"
        assert self.run.report_file.exists()
        wait_until(lambda: not self.bed.processes("bed1"), "nothing is left")


@pytest.fixture
def batch(bed: Bed, request: pytest.FixtureRequest) -> Iterator[Callable[..., Batch]]:
    name = re.sub(r"\W+", "-", request.node.name)[:30]
    yield lambda plan=(), *options, **settings: Batch(
        bed, bed.shared / f"{name}-{time.time_ns() % 10**6}", list(plan), *options, **settings
    )
    bed.command("scancel", "--user", "bed1")


def test_near_its_time_limit_it_saves_and_goes_on_in_another_start(bed: Bed, batch: Callable[..., Batch]) -> None:
    job = batch((), "--signal=B:USR1@20", step_s=4.0)
    job.wait_step(3)
    status = job.cli("status")
    assert re.search(rf"allocation running on n\d, n\d, n\d \(job {job.id}\)", status), status
    command = ["sbatch", "--parsable", f"--output={job.folder}/supervise.log", str(ROOT / "slurm" / "supervise.sbatch")]
    supervisor = bed.run("login", [*command, str(job.run.path)], user="bed1", cwd=str(ROOT)).strip()
    wait_until(lambda: "another process leads the run" in job.events(), "a supervisor looks on")
    hours, minutes, _ = map(int, job.field("RunTime").split(":"))
    limit = f"00:{60 * hours + minutes + 2:02d}:00"  # SLURM looks for jobs that are near theirs twice a minute
    bed.command("scontrol", "update", f"JobId={job.id}", f"TimeLimit={limit}")
    wait_until(lambda: job.field("Restarts") == "1", "it is requeued", PATIENCE_S)
    (job.folder / "runs" / "double.json").write_text('{"step_s": 0.05}')
    assert job.field("TimeLimit") == limit
    bed.command("scontrol", "update", f"JobId={job.id}", "TimeLimit=10")
    job.finished()
    first, second = audit_run(job.run).attempts
    assert second.began_from == first.reached > 0
    assert "saved at step" in job.cli("status")
    wait_until(
        lambda: "JobState=COMPLETED" in bed.command("scontrol", "show", "job", supervisor), "it ends with the run"
    )
    assert "has finished" in (job.folder / "supervise.log").read_text()


def test_a_lost_node_costs_what_was_done_since_the_last_checkpoint(bed: Bed, batch: Callable[..., Batch]) -> None:
    job = batch()
    job.wait_step(7)
    lost = next(e["host"] for e in events_of(job.run) if e["event"] == "rank.start")  # that of the second learner node
    bed.power_off(lost)
    wait_until(lambda: job.field("Restarts") == "1", "it is requeued")
    job.finished()
    first, second = audit_run(job.run).attempts
    assert 0 < second.began_from <= first.reached
    assert lost not in {e["host"] for e in events_of(job.run) if e.get("attempt") == 2}


def test_what_always_crashes_ends_with_its_cause_and_is_not_requeued(batch: Callable[..., Batch]) -> None:
    plan = [{"id": "r", "event": "rollout.group", "deeds": ["raise"], "always": True}]
    job = batch(plan)
    job.wait_state("FAILED")
    assert job.field("ExitCode") == "1:0"
    assert job.field("Restarts") == "0"
    outcome = read_json(job.run.path / "outcome.json") or {}
    assert outcome["kind"] == "fail"
    assert "out of luck" in outcome["reason"]
    assert "out of luck" in job.log()


def test_a_wrong_number_of_nodes_is_refused_before_a_run_exists(batch: Callable[..., Batch]) -> None:
    job = batch((), "--nodes=2")
    job.wait_state("FAILED")
    assert "call sbatch --nodes=3" in job.log()
    assert not job.run.path.exists()


@pytest.mark.parametrize("how", ["stop", "scancel"])
def test_what_a_person_ends_stays_ended(bed: Bed, batch: Callable[..., Batch], how: str) -> None:
    job = batch((), step_s=1.0)
    job.wait_step(2)
    if how == "stop":
        assert f"allocation (job {job.id})" in job.cli("stop")
    else:
        bed.run("login", ["scancel", job.id], user="bed1")
    wait_until(lambda: not bed.processes("bed1"), "nothing is left", PATIENCE_S)
    wait_until(lambda: job.field("JobState") in ("CANCELLED", "FAILED"), f"it is not requeued: {job.log()}")
    assert job.field("Restarts") == "0"
