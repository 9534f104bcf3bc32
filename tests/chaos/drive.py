"""Runs one scenario on a bed and judges it."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from slipstream.run_folder import RunFolder, write_json
from slurm.bed import Bed
from slurm.bed.bed import ROOT
from tests.bed_left import left
from tests.chaos.acts import USER, Acts
from tests.chaos.checks import end_of, expected_end, met, problems_of, recovery_times
from tests.chaos.ending import Ending
from tests.chaos.plan import GROUP, Scenario
from tests.chaos.results import Result
from tests.doubles.events import FOLDER, PLAN, events_of
from tests.doubles.events import SETTINGS as DOUBLES

RUN_ID = "r"
LEASE_S = 8.0
POLL_S = 1.0
PATIENCE_S = 420.0
GONE_S = 15.0
PYTHON = str(ROOT / ".venv" / "bin" / "python")

SETTINGS: dict[str, dict[str, Any]] = {
    "model": {"name": "double"},
    "trainer": {"num_generations": GROUP, "save_total_limit": 3, "rollout_worker_timeout": 5.0, "max_staleness": 12},
    "server": {"gpus": 0, "startup_timeout": 90.0, "stall_timeout": 8.0},
    "learner": {"gpus": 0, "startup_timeout": 90.0, "step_timeout": 45.0, "sync_timeout": 45.0, "save_timeout": 20.0},
    "recovery": {"backoff": 1.0, "backoff_max": 4.0, "lease": LEASE_S, "poll": POLL_S, "heartbeat_timeout": 20.0},
}
PROFILE = {"executor": "slurm", "exclusive": True, "time_limit": 10, "signal_lead": 20, "client_timeout": 10}


def toml(value: Any) -> str:
    """A value as TOML has it; JSON's text does for all that is used here."""
    return json.dumps(value)


def write_files(folder: Path, scenario: Scenario) -> Path:
    """Prompts, profile, configuration and plan of faults; the configuration's path."""
    (folder / "runs").mkdir(parents=True)
    data = folder / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(scenario.prompts)))
    profile = folder / "profile.toml"
    profile.write_text("".join(f"{k} = {toml(v)}\n" for k, v in {**PROFILE, **scenario.profile}.items()))
    sections = {name: dict(section) for name, section in SETTINGS.items()}
    sections["data"] = {"source": str(data)}
    sections["trainer"] |= {"num_train_epochs": scenario.epochs, "save_steps": scenario.save_steps}
    sections["server"] |= {"nodes": scenario.server_nodes, "data_parallel_size": scenario.server_nodes}
    sections["learner"] |= {"nodes": scenario.learner_nodes, "processes_per_node": scenario.ranks}
    sections["cluster"] = {"profile": str(profile), "shape": scenario.shape}
    sections["storage"] = {"root": str(folder / "runs")}
    config = folder / "run.toml"
    config.write_text(
        "".join(
            f"[{name}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in section.items())
            for name, section in sections.items()
        )
    )
    write_json(folder / "runs" / PLAN, scenario.plan)
    write_json(folder / "runs" / DOUBLES, {"step_s": scenario.step_s})
    return config


class Driver:
    """One scenario on one bed."""

    def __init__(self, bed: Bed, scenario: Scenario, folder: Path) -> None:
        self.bed, self.scenario, self.folder = bed, scenario, folder
        self.config = write_files(folder, scenario)
        uid = bed.description.uid(USER)
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, uid, uid)
        self.run = RunFolder(folder / "runs" / RUN_ID)
        self.supervisors: list[subprocess.Popen[str]] = []
        self.acts = Acts(bed, self.run, self.supervisors, self.start_supervisor, self.stop_run, LEASE_S, POLL_S)
        self.ending = Ending(bed, self.acts, USER)
        self.log = bed.shared / "chaos" / f"seed-{scenario.seed}.log"
        self._log = open(self.log, "w")  # noqa: SIM115

    def start_supervisor(self) -> None:
        command = [PYTHON, "-m", "tests.chaos.supervise", str(self.config), RUN_ID]
        self.supervisors.append(self._popen(command))

    def stop_run(self) -> "subprocess.Popen[str]":
        code = "from flows.cli.main import main; main()"
        return self._popen([PYTHON, "-c", code, "stop", str(self.run.path), "--why", "chaos"])

    def _popen(self, command: list[str]) -> "subprocess.Popen[str]":
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        return self.bed.popen(
            "login", command, user=USER, cwd=str(ROOT), env=env, stdout=self._log, stderr=subprocess.STDOUT
        )  # fmt: skip

    def drive(self) -> Result:
        begun = time.monotonic()
        problems: list[str] = []
        self.start_supervisor()
        acting = threading.Thread(target=self._act, daemon=True)
        acting.start()
        try:
            if not self._until_ended(begun + PATIENCE_S):
                problems.append(f"it did not end within {PATIENCE_S:.0f} s")
            problems += [f"left {what}" for what in left(self.bed, USER, GONE_S, self.ending.look)]
        finally:
            self._over = True
            acting.join(90)
            self.acts.mend()
            self._clean()
        problems += self.ending.problems()
        if self.scenario.storage and not (self.acts.given_up and all(self.acts.given_up)):
            problems.append(f"the supervisor did not give up: {self.acts.given_up}")
        if self.scenario.storage and "storage takes no writes" not in self.log.read_text():
            problems.append("the supervisor did not say that the storage takes no writes")
        return self._result(problems, time.monotonic() - begun)

    _over = False

    def _until_ended(self, deadline: float) -> bool:
        """Start another supervisor where the last has died before the run's end, as a person or a service would."""
        while time.monotonic() < deadline:
            self.ending.look()
            if all(process.poll() is not None for process in self.supervisors):
                if end_of(self.run)[0]:
                    return True
                time.sleep(1)
                self.start_supervisor()
            time.sleep(0.2)
        return False

    def _act(self) -> None:
        """Do what each injection asks of the driver once it is met."""
        waiting = {injection.id: injection for injection in self.scenario.injections if injection.act}
        while waiting and not self._over:
            for name, at in met(self.run, self.scenario).items():
                if injection := waiting.pop(name, None):
                    getattr(self.acts, injection.act)(at, self.run.path / FOLDER / f"go-{name}")
            time.sleep(0.1)

    def _clean(self) -> None:
        for process in self.supervisors:
            if process.poll() is None:
                process.kill()
        self.bed.command("scancel", "--user", USER)
        self.bed.command("scancel", "--user", "bed2")
        self._log.close()

    def _result(self, problems: list[str], seconds: float) -> Result:
        names = {injection.id: injection.fault for injection in self.scenario.injections}
        reached = met(self.run, self.scenario)
        attempts, redone = 0, 0
        if self.run.run_file.exists():
            found, audit = problems_of(self.run, self.scenario)
            problems = problems + found
            attempts, redone = len(audit.attempts), audit.redone
        else:
            problems = [*problems, "there is no run"]
        times = recovery_times(events_of(self.run), reached)
        return Result(
            seed=self.scenario.seed,
            faults=self.scenario.names,
            shape=self.scenario.shape,
            expected=" or ".join(sorted(expected_end(self.run, self.scenario))),
            end=end_of(self.run)[0],
            met=[names[name] for name in reached],
            problems=problems,
            attempts=attempts,
            redone=redone,
            seconds=round(seconds, 1),
            ended_after_s=self.ending.after_s,
            load=round(self.ending.load, 1),
            recovery_s={names[name]: round(value, 1) for name, value in times.items()},
        )


def run_scenario(bed: Bed, scenario: Scenario, keep: bool = False) -> Result:
    """Run and judge one; its files stay only where something is wrong, or with `keep`."""
    (bed.shared / "chaos").mkdir(exist_ok=True)
    folder = (bed.folder / (scenario.storage or "shared")) / "chaos" / f"seed-{scenario.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    driver = Driver(bed, scenario, folder)
    result = driver.drive()
    if result.right and not keep:
        shutil.rmtree(folder, ignore_errors=True)
        driver.log.unlink(missing_ok=True)
    else:
        print(f"seed {scenario.seed}: files in {folder}", file=sys.stderr)
    return result
