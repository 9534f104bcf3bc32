"""The real server, learner and supervisor on the SLURM test bed: a run of `bed1`, started on the login machine."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from cluster.jobs import JobRecord, read_jobs
from slipstream.metrics.audit_records import audit_run
from slipstream.run_folder import RunFolder, read_json, read_jsonl
from slurm.bed import Bed
from slurm.bed.bed import ROOT
from slurm.bed.machines import inside
from tasks.lease import newest_term
from tests.bed_left import left

USER = "bed1"
PYTHON = str(ROOT / ".venv" / "bin" / "python")
CLI = [PYTHON, "-c", "from flows.cli.main import main; main()"]
RUN_ID = "r"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONPATH": str(ROOT),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
START_S = 300.0
RECOVER_S = 240.0
GONE_S = 60.0

TRAINER = {
    "max_completion_length": 16,
    "num_generations": 4,
    "token_budget": 256,
    "learning_rate": 1e-3,
    "gradient_checkpointing": False,
    "save_steps": 5,
    "save_total_limit": 3,
    "max_staleness": 4,
}
SECTIONS: dict[str, dict[str, Any]] = {
    "reward": {"functions": ["tests.sample_rewards:paced_low_bytes"]},
    "server": {"gpus": 0, "max_model_len": 512, "kv_cache_memory": "64M", "stall_timeout": 60.0},
    "learner": {"gpus": 0, "processes_per_node": 2},
    "recovery": {"backoff": 1.0, "backoff_max": 4.0, "poll": 1.0, "lease": 10.0},
}
PROFILE = {"executor": "slurm", "exclusive": True, "time_limit": 20, "signal_lead": 40}


def prompt_rows(count: int, pace_file: Path) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"count {i}"}], "pace_file": str(pace_file)} for i in range(count)]


def toml(sections: dict[str, dict[str, Any]]) -> str:
    """Sections as TOML; JSON's text does for all the values that are used here."""
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )


class FullRun:
    """One run in a folder of its own on the bed's shared storage.

    Args:
        pace_s: seconds that the reward of a group takes; `pace` changes it.
        environment: of the person who starts the commands, besides the usual.
        storage: of the bed: shared or limited.
    """

    def __init__(
        self,
        bed: Bed,
        name: str,
        *,
        prompts: int = 60,
        epochs: int = 1,
        pace_s: float = 0.0,
        profile: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        storage: str = "shared",
        **sections: dict[str, Any],
    ) -> None:
        self.bed = bed
        self._environment = {**ENVIRONMENT, **(environment or {})}
        self.folder = bed.folder / storage / name
        self.prompts, self.epochs = prompts, epochs
        self.folder.mkdir(parents=True)
        (self.folder / "runs").mkdir()
        from tests.models import save_tiny_model  # torch

        save_tiny_model(self.folder / "model", tied=True)
        self._pace = self.folder / "pace"
        self.pace(pace_s)
        data = self.folder / "train.jsonl"
        rows = prompt_rows(prompts, self._pace)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        profile_file = self.folder / "profile.toml"
        profile_file.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in {**PROFILE, **(profile or {})}.items()))
        whole: dict[str, dict[str, Any]] = {
            "model": {"name": str(self.folder / "model")},
            "data": {"source": str(data)},
            "trainer": {**TRAINER, "num_train_epochs": epochs},
            **SECTIONS,
            "cluster": {"profile": str(profile_file)},
            "storage": {"root": str(self.folder / "runs")},
        }
        for section, values in sections.items():
            whole[section] = {**whole.get(section, {}), **values}
        self.config = self.folder / "run.toml"
        self.config.write_text(toml(whole))
        self._log = open(self.folder / "command-line.log", "a")  # noqa: SIM115
        uid = bed.description.uid(USER)
        for path in [self.folder, *self.folder.rglob("*")]:
            os.chown(path, uid, uid)
        self.started: list[subprocess.Popen[str]] = []

    def pace(self, seconds: float | str) -> None:
        """What is not a number makes the reward raise."""
        temporary = self._pace.with_suffix(".new")
        temporary.write_text(str(seconds))
        temporary.replace(self._pace)

    # -- commands of a person on the login machine

    def command(self, *words: str) -> "subprocess.Popen[str]":
        """`slipstream WORDS`, its words in command-line.log."""
        return self._popen([*CLI, *words])

    def _popen(self, words: list[str]) -> "subprocess.Popen[str]":
        process = self.bed.popen(
            "login", words, user=USER, cwd=str(ROOT), env=self._environment, stdout=self._log, stderr=subprocess.STDOUT
        )
        self.started.append(process)
        return process

    def train(self) -> "subprocess.Popen[str]":
        """`slipstream train`: the Prefect flow."""
        return self.command("train", str(self.config))

    def supervise(self) -> "subprocess.Popen[str]":
        """A supervisor without a flow, which makes the run where there is none."""
        return self._popen([PYTHON, "-m", "tests.chaos.supervise", "--real", str(self.config), RUN_ID])

    def wait(self, process: "subprocess.Popen[str]", seconds: float = 600) -> int:
        """The exit code of a command; fails with its words where it does not end."""
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds:g} s\n{self.words()}") from None

    def words(self) -> str:
        """The last that the commands said."""
        return (self.folder / "command-line.log").read_text()[-4000:]

    # -- what can be seen from outside

    @property
    def run(self) -> RunFolder:
        """The run folder; the only one of this storage root."""
        found = sorted(path.parent for path in (self.folder / "runs").glob("*/run.toml"))
        return RunFolder(found[0] if found else self.folder / "runs" / RUN_ID)

    @property
    def step(self) -> int:
        """Of the newest line of the newest attempt's metrics that counts."""
        if not (attempts := self.run.attempts()):
            return 0
        lines = [line for line in read_jsonl(self.run.records(attempts[-1]) / "metrics.jsonl") if "loss" in line]
        return int(lines[-1]["step"]) if lines else 0

    @property
    def attempt(self) -> int:
        return (self.run.attempts() or [0])[-1]

    def beat(self, writer: str = "learner") -> dict[str, Any]:
        with contextlib.suppress(ValueError, OSError):
            return read_json(self.run.heartbeat_file(writer)) or {}
        return {}

    def assigned(self) -> dict[str, Any]:
        return self.run.assignment()

    def endpoint(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError, OSError):
            return read_json(self.run.endpoint_file()) or {}
        return {}

    def jobs(self) -> list[JobRecord]:
        return [job for attempt in self.run.attempts() for job in read_jobs(self.run, attempt)]

    def job(self, role: str) -> JobRecord:
        """The newest job of a role."""
        return next(job for job in reversed(self.jobs()) if job.role in (role, "allocation"))

    def nodes(self, role: str) -> list[str]:
        """Of the newest job of a role: of one allocation the learner's come first, the server's last."""
        nodes = self.bed.command("squeue", "-h", "-j", self.job(role).job_id, "-o", "%N").strip()
        return self.bed.command("scontrol", "show", "hostnames", nodes).split()

    def host(self, role: str) -> str:
        """The role's first node."""
        nodes, whole = self.nodes(role), self.job(role).role == "allocation"
        return nodes[-1] if whole and role == "server" else nodes[0]

    def processes(self, *words: str, machine: str = "") -> list[psutil.Process]:
        """Processes of the bed's user whose command line has all of `words`, without clients of SLURM."""
        found = []
        for one in self.bed.processes(USER):
            client = one.command.split(" ")[0].rpartition("/")[2] == "srun"
            if all(word in one.command for word in words) and not client and machine in ("", one.machine):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(one.pid))
        return found

    def ranks(self) -> list[psutil.Process]:
        found = self.processes("-m slipstream.learner.main")
        return [process for process in found if "slipstream.learner.torchrun" not in process.cmdline()]

    def rollout(self) -> list[psutil.Process]:
        """The only process that rank 0 has spawned through multiprocessing."""
        ranks = {process.pid for process in self.ranks()}
        return [process for process in self.processes("spawn_main") if process.ppid() in ranks]

    def engine(self) -> list[psutil.Process]:
        """vLLM's API server."""
        return self.processes("vllm.entrypoints")

    def leader(self, role: str) -> list[psutil.Process]:
        """The process that stands in front of a role on its first node."""
        return self.processes("-m cluster.entry", self.job(role).incarnation, machine=self.host(role))

    def reach(self, step: int, seconds: float = START_S, attempt: int = 1, led: bool = True) -> None:
        """Wait for a line of metrics of this step, in `attempt` or later; with `led` fails where nobody leads the run."""

        def reached() -> bool:
            if led and all(process.poll() is not None for process in self.started):
                raise AssertionError(f"nobody leads the run any more\n{self.words()}")
            return self.attempt >= attempt and self.step >= step

        until(reached, f"step {step} of attempt {attempt}", seconds)

    @property
    def terms(self) -> int:
        """How many leaders there have been."""
        return newest_term(self.run)

    def left(self, seconds: float = GONE_S, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
        """Jobs and processes that are still there after a while. `meanwhile` is called at every look."""
        return left(self.bed, USER, seconds, meanwhile)

    def findings(self) -> list[str]:
        """What the audit has to say against the run, and whether all prompts were settled."""
        audit = audit_run(self.run)
        found = [str(finding) for finding in audit.findings]
        if audit.finished and audit.settled != self.prompts * self.epochs:
            found.append(f"{audit.settled} of {self.prompts * self.epochs} prompts settled")
        return found

    def outcome(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError, OSError):
            return read_json(self.run.path / "outcome.json") or {}
        return {}

    def faults(self) -> list[dict[str, Any]]:
        return read_jsonl(self.run.path / "records" / "faults.jsonl")

    # -- faults

    def kill(self, process: "subprocess.Popen[str]") -> None:
        """SIGKILL to a command on the login machine, and nothing else."""
        pid = inside(process.pid)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def limit_time(self, role: str, seconds: float) -> None:
        """The newest job of a role ends so many seconds from now, at its time limit (which may not be below a minute)."""
        job = self.job(role).job_id
        begun = self.bed.command("squeue", "-h", "-j", job, "-o", "%S").strip()
        ran = time.time() - time.mktime(time.strptime(begun, "%Y-%m-%dT%H:%M:%S"))
        minutes, rest = divmod(max(int(ran + seconds), 60), 60)
        self.bed.command("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}:{rest:02d}")

    def close(self) -> None:
        """Nothing of the run goes on."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
        self.bed.command("sh", "-c", f"scontrol ping >/dev/null && scancel --user {USER} || true")
        self._log.close()


def steps_of(run: RunFolder) -> list[tuple[float, int]]:
    """(seconds since the epoch, step) of every line of metrics that counts."""
    return [(line["time"], line["step"]) for line in run.merged_records("metrics.jsonl") if "loss" in line]


def until(condition: Callable[[], Any], what: str, seconds: float = RECOVER_S) -> Any:
    """The first true value of `condition`; fails after the deadline."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return value
