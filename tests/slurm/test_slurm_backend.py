"""The SLURM backend against a real SLURM, as an unprivileged user on the login machine."""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from slurm.bed import Bed, BedError
from slurm.bed.machines import processes
from tests.secret_scan import texts
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]
STANDINS = ROOT / "tests" / "standins"
PYTHON = str(ROOT / ".venv" / "bin" / "python")
SECRET = "planted-9f2c-secret"


class Backend:
    """Calls of the backend by bed1 on the login machine, each in a process of its own."""

    def __init__(self, bed: Bed, run: Path) -> None:
        self.bed, self.run = bed, run
        self.token = self("create")

    def __call__(self, command: str, **given: Any) -> Any:
        words = [
            PYTHON,
            str(STANDINS / "standin_slurm_backend.py"),
            command,
            json.dumps({"run": str(self.run), **given}),
        ]
        environment = {"PYTHONPATH": f"{ROOT}:{STANDINS}", "HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET}
        output = self.bed.run("login", words, user="bed1", cwd=str(ROOT), env=environment, seconds=180)
        return json.loads(output.splitlines()[-1])

    def submit(self, leader: str = "server", role: str = "server", incarnation: str = "aa11", **given: Any) -> Any:
        leaders = {role: f"standin_slurm_leaders:{leader}"}
        return self("submit", role=role, incarnation=incarnation, **{"leaders": leaders, **given})

    def view(self, incarnation: str = "aa11") -> dict[str, Any]:
        return dict(self("look")[incarnation])

    def wait_state(self, state: str, incarnation: str = "aa11") -> dict[str, Any]:
        return wait_until(lambda: (seen := self.view(incarnation))["state"] == state and seen, f"{incarnation} {state}")

    def facts(self, name: str) -> dict[str, Any]:
        path = self.run / "facts" / f"{name}.json"
        wait_until(path.exists, f"{name} has started")
        return dict(json.loads(path.read_text()))

    def records(self) -> list[dict[str, Any]]:
        path = self.run / "jobs" / "1.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def no_process(bed: Bed) -> bool:
    return not bed.processes("bed1")


@pytest.fixture
def backend(bed: Bed, request: pytest.FixtureRequest) -> Iterator[Backend]:
    name = re.sub(r"\W+", "-", request.node.name)[:40]
    yield Backend(bed, bed.shared / f"{name}-{time.time_ns() % 10**9}")
    bed.command("sh", "-c", "scontrol ping >/dev/null && scancel --user bed1 || true")


@pytest.fixture
def tiny(bed: Bed) -> Iterator[None]:
    """A partition that gives a job one node and ten minutes."""
    bed.command("scontrol", "create", "PartitionName=tiny", "MaxNodes=1", "MaxTime=10", "Nodes=ALL")
    yield
    bed.command("scontrol", "delete", "PartitionName=tiny")


def test_a_job_is_submitted_seen_and_cancelled(bed: Bed, backend: Backend) -> None:
    record = backend.submit()
    assert backend.records() == [record]
    facts = backend.facts("server-0")
    view = backend.wait_state("running")
    assert view["nodes"] == [facts["host"]]
    assert view["source"] == "squeue"
    assert facts["umask"] == 0o077
    assert facts["cwd"] == str(ROOT)
    environment = facts["environment"]
    assert environment["SLIPSTREAM_HOST"] == bed.description.address(facts["host"])
    assert (environment["SLIPSTREAM_NODES"], environment["SLIPSTREAM_INCARNATION"]) == ("1", "aa11")
    assert environment["HOME"] == str(bed.description.home("bed1"))
    assert "." not in environment["PATH"].split(":")
    assert "WANDB_API_KEY" not in environment
    assert backend("cancel", kill_after_s=20.0) == ["aa11"]
    seen = backend.view()
    assert (seen["state"], seen["reason"], seen["returncode"]) == ("finished", "stopped by SIGTERM", 0)
    wait_until(lambda: no_process(bed), "nothing is left")
    assert backend("cancel") == []


def test_how_a_leader_ended_is_its_own_word(backend: Backend) -> None:
    backend.submit("dies")
    view = backend.wait_state("failed")
    assert (view["returncode"], view["reason"], view["final"]) == (3, "out of luck", True)


def test_waiting_held_and_cancelled_by_a_person(bed: Bed, backend: Backend) -> None:
    job_id = backend.submit()["job_id"]
    backend.facts("server-0")
    second = backend.submit(incarnation="bb22")["job_id"]  # of the same name: it waits for the first
    assert backend.wait_state("pending", "bb22")["queue_reason"] == "Dependency"
    bed.run("login", ["scontrol", "hold", second], user="bed1")
    assert backend.wait_state("held", "bb22")["queue_reason"] == "JobHeldUser"
    bed.run("login", ["scancel", job_id], user="bed1")
    assert backend.wait_state("cancelled")["reason"] == "stopped by SIGTERM"
    assert backend("cancel") == ["bb22"]
    backend.wait_state("cancelled", "bb22")


def test_a_refusal_has_slurms_words_and_leaves_no_open_intent(backend: Backend) -> None:
    answer = backend.submit(profile={"partition": "nowhere"}, unchecked=True)
    assert answer["error"] == "ClusterError"
    assert "invalid partition" in answer["words"]
    assert [path.name for path in (backend.run / "intents").iterdir()] == ["1-server-aa11.void"]


@pytest.mark.parametrize(
    ("profile", "learner", "words"),
    [
        ({}, {"nodes": 2}, ["the learner needs 2 nodes", "tiny gives a job 1", "learner's nodes"]),
        ({"time_limit": 30}, {}, ["time_limit = 30 min, but tiny allows 10", "lower `time_limit`"]),
        ({}, {"gpus": 9, "processes_per_node": 9}, ["the learner needs 1 node with 9 GPUs"]),
        ({"cpus_per_task": 900}, {}, ["refuse the server's job", "not available", "`cpus_per_task`"]),
        ({"constraint": "h100"}, {}, ["Invalid feature", "change `constraint` ('h100')"]),
        ({"partition": "nowhere"}, {}, ["invalid partition", "change `partition` ('nowhere')"]),
        ({"reservation": "none"}, {}, ["reservation", "change `reservation` ('none')"]),
    ],
)
def test_what_slurm_would_refuse_or_keep_waiting_for_ever(
    tiny: None, backend: Backend, profile: dict[str, Any], learner: dict[str, Any], words: list[str]
) -> None:
    profile = {"partition": "tiny", "time_limit": 10, **profile}
    found = backend("check", profile=profile, config={"learner": learner})
    assert found["error"] == "ClusterError"
    assert all(word in found["words"] for word in ["cluster.profile = ", *words]), found


def test_what_cannot_start_now_is_not_refused(bed: Bed, tiny: None, backend: Backend) -> None:
    profile = {"partition": "tiny", "time_limit": 10}
    assert backend("check", profile=profile) == "possible"
    for name in bed.description.node_names:
        bed.drain(name)
    assert backend("check", profile=profile) == "possible"
    assert "nodes" in backend("check", profile=profile, config={"learner": {"nodes": 2}})["words"]


def test_a_wrong_learner_leaves_no_server(bed: Bed, tiny: None, backend: Backend) -> None:
    folder = bed.shared / f"refused-{time.time_ns() % 10**9}"
    folder.mkdir()
    os.chown(folder, bed.description.uid("bed1"), bed.description.uid("bed1"))
    profile = folder / "profile.toml"
    profile.write_text('executor = "slurm"\npartition = "tiny"\ntime_limit = 10\n')
    profile.chmod(0o644)
    values = [f"cluster.profile={profile}", f"storage.root={folder}/runs", "learner.nodes=2"]
    options = [word for value in values for word in ("--set", value)]
    command = [PYTHON, "-c", "from flows.cli.main import main; main()", "train", "examples/demo.toml", *options]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = bed.command("squeue", "-h", "-t", "all", "-o", "%i")
    process = bed.popen("login", command, user="bed1", cwd=str(ROOT), env=env, stdout=PIPE, stderr=PIPE)
    output, errors = process.communicate(timeout=180)
    assert process.returncode != 0
    assert "the learner needs 2 nodes" in output + errors
    assert set(bed.command("squeue", "-h", "-t", "all", "-o", "%i").split()) <= set(before.split())
    assert not list(folder.glob("runs/*"))


def test_a_controller_that_is_away_tells_nothing_and_ends_nothing(bed: Bed, backend: Backend) -> None:
    backend.submit()
    backend.facts("server-0")
    bed.stop_controller()
    view = backend.view()
    assert view["state"] == "unknown"
    assert "squeue" in view["reason"]
    assert backend.submit(incarnation="bb22")["error"] == "ClusterAway"
    assert backend("adopt")["error"] == "ClusterAway"
    assert (backend.run / "intents" / "1-server-bb22.json").exists()
    bed.start_controller()
    backend.wait_state("running")
    assert backend("adopt") == []  # the second never was: its submitter is dead, and squeue answers
    assert (backend.run / "intents" / "1-server-bb22.void").exists()


def test_killed_between_sbatch_and_the_record_it_is_adopted_and_not_doubled(bed: Bed, backend: Backend) -> None:
    with pytest.raises(BedError):
        backend.submit(die=True)
    assert backend.records() == []
    (adopted,) = backend("adopt")
    assert adopted["incarnation"] == "aa11"
    assert backend.records() == [adopted]
    backend.wait_state("running")
    assert backend("adopt") == []
    names = bed.run("login", ["squeue", "-h", "-t", "all", "-o", "%j"], user="bed1").split()
    assert names.count(f"slipstream-{backend.run.name}-server") == 1


def test_a_lost_intent_is_no_lost_job(backend: Backend) -> None:
    with pytest.raises(BedError):
        backend.submit(die=True)
    (backend.run / "intents" / "1-server-aa11.json").rename(backend.run / "intents" / "1-server-aa11.void")
    assert [job["incarnation"] for job in backend("adopt")] == ["aa11"]


def test_without_accounting(bed: Bed, backend: Backend) -> None:
    bed.stop_dbd()
    try:
        backend.submit()
        backend.facts("server-0")
        assert backend("cancel", kill_after_s=20.0) == ["aa11"]
        assert backend.view()["state"] == "finished"
        bed.run("login", ["sh", "-c", "! sacct"], user="bed1")
    finally:
        bed.start_dbd()


def test_what_ignores_term_is_killed_long_before_the_clusters_own_patience(bed: Bed, backend: Backend) -> None:
    conf = Path(bed.description.slurm_conf)
    text = conf.read_text()
    try:
        conf.write_text(text.replace("KillWait=3\n", "KillWait=900\n"))
        bed.command("scontrol", "reconfigure")
        assert "KillWait                = 900" in bed.command("scontrol", "show", "config")
        backend.submit("deaf", config={"server": {"nodes": 2, "gpus": 0, "data_parallel_size": 2}})
        backend.facts("server-0")
        backend.facts("server-1")
        assert backend("cancel", kill_after_s=1.0) == ["aa11"]
        wait_until(lambda: no_process(bed), "nothing is left", 300)
        wait_until(lambda: backend.view()["state"] in ("failed", "cancelled"), "SLURM has seen it end")
    finally:
        conf.write_text(text)
        bed.command("scontrol", "reconfigure")


def test_a_lost_node(bed: Bed, backend: Backend) -> None:
    backend.submit(exclude=["n1", "n2"], config={"server": {"nodes": 2, "gpus": 0, "data_parallel_size": 2}})
    hosts = {backend.facts(f"server-{rank}")["host"] for rank in (0, 1)}
    assert len(hosts) == 2
    assert not hosts & {"n1", "n2"}
    lost = backend.facts("server-1")["host"]
    bed.power_off(lost)
    view = backend.wait_state("node failed")
    assert (view["nodes"], view["lost"]) == (sorted(hosts), [lost])
    wait_until(lambda: no_process(bed), "the other node is free")


def test_one_allocation_learners_first_that_ends_together(bed: Bed, backend: Backend) -> None:
    config = {
        "server": {"nodes": 2, "gpus": 1, "data_parallel_size": 2},
        "learner": {"gpus": 2, "processes_per_node": 2},
    }
    config["cluster"] = {"shape": "one_allocation"}
    leaders = {role: f"standin_slurm_leaders:{role}" for role in ("server", "learner")}
    backend.submit(role="allocation", leaders=leaders, config=config)
    facts = [backend.facts(name) for name in ("learner-0", "server-0", "server-1")]
    assert [one["environment"]["SLURM_NODEID"] for one in facts] == ["0", "1", "2"]
    assert [one["environment"]["SLIPSTREAM_NODES"] for one in facts] == ["1", "2", "2"]
    assert {one["environment"]["CUDA_VISIBLE_DEVICES"] for one in facts} == {"0,1"}
    assert backend.wait_state("running")["nodes"] == [one["host"] for one in facts]
    bed.run("login", ["touch", str(backend.run / "finish")], user="bed1")
    view = backend.wait_state("finished")
    assert view["returncode"] == 0
    wait_until(lambda: no_process(bed), "the servers have ended with the learner")


def test_no_secret_is_where_others_could_read_it(bed: Bed, backend: Backend) -> None:
    job_id = backend.submit(profile={"keep_environment": ["HF_TOKEN"]})["job_id"]
    environment = backend.facts("server-0")["environment"]
    assert environment["HF_TOKEN"] == SECRET  # it does reach the job
    assert "WANDB_API_KEY" not in environment
    places = {
        "job": bed.command("scontrol", "show", "job", "-dd", job_id),
        "batch script": bed.command("scontrol", "write", "batch_script", job_id, "-"),
        "processes": "\n".join(one.command for one in processes(str(bed.folder))),
    }
    assert "cluster.entry" in places["processes"]
    assert "#SBATCH --export=NONE" in places["batch script"]
    private = {backend.run / "secrets", backend.run / "facts"}
    folders = [bed.folder / name for name in ("state", "spool", "log")] + [backend.run]
    for path, text in texts(folders):
        if not private & set(path.parents):
            places[str(path)] = text.decode(errors="replace")
    assert any(path.endswith("/script") for path in places)
    assert any(path.endswith("_0_log.out") for path in places)
    found = [place for place, text in places.items() if SECRET in text or backend.token in text]
    assert found == []
    for path in (backend.run / "secrets").iterdir():
        assert path.stat().st_mode & 0o077 == 0
