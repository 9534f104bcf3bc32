"""`slipstream up` for tests: a process with a home, a port and a storage root of its own, whose runs are the doubles'."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from cluster.local_jobs import cancel_jobs
from flows.up.engine import FLOW_RUN_ENV
from slipstream.process import last_lines
from slipstream.run_folder import RunFolder, write_json
from tasks.stored import all_jobs
from tests.doubles.events import FOLDER, PLAN
from tests.prefect_database import seed
from tests.prefect_server import ROOT, environment, request
from tests.waiting import wait_until

PATIENCE_S = 480
INSTANCE = "tester"
BUSY = 503  # SQLite is locked: Prefect's own clients and its page ask again too
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

QUICK = """\
name = "quick"

[model]
name = "m"

[data]
source = "{root}/prompts.jsonl"

[trainer]
num_train_epochs = 1
num_generations = 3
save_steps = 4
save_total_limit = 2

[server]
gpus = 0

[learner]
gpus = 0
processes_per_node = 2

[storage]
root = "{root}"

[recovery]
backoff = 0
lease = 5.0
poll = 0.5
"""


def cli(*words: str) -> list[str]:
    return [sys.executable, "-m", "flows.cli.main", *words]


class Front:
    """One home of `slipstream up`.

    Attributes:
        home: SLIPSTREAM_HOME. root: storage root of the preset "quick".
        environment: for commands at this home (they find its server by themselves).
        url: what a browser opens. api: of the server.
        deployment: full name of the deployment that starts a quick run.
    """

    deployment = f"train/{INSTANCE}.quick"

    def __init__(self, folder: Path, fresh: bool = False, **more: str) -> None:
        """`fresh`: it makes its database by itself. `more`: of its environment."""
        self.home, self.root = folder / "home", folder / "runs"
        self.root.mkdir(parents=True)
        if not fresh:
            self.home.mkdir(mode=0o700)
            seed(self.home / "prefect")
        (self.root / "prompts.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(12)))
        self.preset = folder / "quick.toml"
        self.preset.write_text(QUICK.format(root=self.root))
        self.words = ["--preset", str(self.preset)]  # of every `slipstream up`
        self.environment = environment(
            SLIPSTREAM_HOME=str(self.home),
            SLIPSTREAM_INSTANCE=INSTANCE,
            STANDIN_LEADERS="doubles",
            STANDIN_DIES_IN_PREPARE=str(folder / "dies-in-prepare"),
            HOME=str(folder),
            **more,
        )
        self.output = folder / "up.out"
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def up(self) -> dict[str, Any]:
        path = self.home / "up.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @property
    def url(self) -> str:
        return str(self.up["ui"])

    @property
    def api(self) -> str:
        return str(self.up["url"])

    @property
    def auth(self) -> tuple[str, str]:
        name, _, secret = (self.home / "auth").read_text().strip().partition(":")
        return name, secret

    def launch(self, *words: str) -> subprocess.Popen[bytes]:
        with open(self.output, "ab") as out:
            argv = cli("up", *self.words, *words)
            process = subprocess.Popen(
                argv, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        return process

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The newest one."""
        return self.processes[-1] if self.processes else None

    def start(self, port: int | None = 0) -> "Front":
        """`slipstream up`, until it is ready. `port` None: that of last time."""
        process = self.launch(*([] if port is None else ["--port", str(port)]))

        def ready() -> bool:
            assert process.poll() is None, last_lines(self.output)
            return self.up.get("pid") == process.pid and bool(self.up.get("ready"))

        wait_until(ready, f"slipstream up is ready\n{last_lines(self.output)}", PATIENCE_S)
        return self

    def stop(self) -> None:
        """End it as Ctrl-C does; runs go on."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)

    def close(self) -> None:
        """End it, the flow processes and the jobs."""
        try:
            self.stop()
        finally:
            for pid in flow_processes(self.home):
                kill(pid)
            for run in self.runs():
                cancel_jobs(all_jobs(run), grace_s=0.1)

    def runs(self) -> list[RunFolder]:
        return [RunFolder(path.parent) for path in sorted(self.root.glob("*/run.toml"))]

    def command(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A command at this home, to its end."""
        return subprocess.run(
            cli(*words),
            cwd=ROOT,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    # --- the API, as a person's browser uses it

    def ask(self, method: str, route: str, body: Any = None) -> Any:
        return request(method, f"{self.api}/{route}", body, self.auth)

    def find_deployment(self, name: str | None = None) -> dict[str, Any]:
        flow, _, short = (name or self.deployment).partition("/")
        return dict(self.ask("GET", f"deployments/name/{flow}/{short}"))

    def submit(self, name: str | None = None, **parameters: Any) -> str:
        """Start a flow run of a deployment; its id. `parameters` take the places of the deployment's."""
        deployment = self.find_deployment(name)
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return str(self.ask("POST", f"deployments/{deployment['id']}/create_flow_run", body)["id"])

    def quick_config(self, **changes: dict[str, Any]) -> dict[str, Any]:
        """The preset's configuration with changed keys: quick_config(trainer={"num_train_epochs": 2})."""
        config = dict(self.find_deployment()["parameters"]["config"])
        for section, values in changes.items():
            config[section] = {**config[section], **values} if isinstance(values, dict) else values
        return config

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"flow_runs/{flow_run_id}"))

    def state(self, flow_run_id: str) -> str:
        return str(self.flow_run(flow_run_id)["state_type"])

    def wait_state(self, flow_run_id: str, *types: str, seconds: float = PATIENCE_S) -> dict[str, Any]:
        """The flow run once its state is of one of `types` (default: any that ends it)."""
        wanted = types or ENDED
        end = time.monotonic() + seconds
        while (found := self.flow_run(flow_run_id))["state_type"] not in wanted:
            assert time.monotonic() < end, f"{found['state']}\n{last_lines(self.log_of(flow_run_id))}"
            time.sleep(0.3)
        return found

    def wait_passes(self, count: int) -> list[str]:
        """Ids of so many passes of reconciliation that have begun and completed from now on, by its schedule."""
        own = self.find_deployment(f"reconcile/{INSTANCE}.reconcile")["id"]
        since = datetime.now(UTC).isoformat()
        begun = {
            "deployment_id": {"any_": [own]},
            "start_time": {"after_": since},
            "state": {"type": {"any_": ["COMPLETED"]}},
        }

        def passes() -> list[str]:
            found = [one["id"] for one in self.ask("POST", "flow_runs/filter", {"flow_runs": begun})]
            return found if len(found) >= count else []

        return wait_until(passes, f"{count} passes of reconciliation", PATIENCE_S)  # type: ignore[no-any-return]

    def log_of(self, flow_run_id: str) -> Path:
        return self.home / "logs" / "flow-runs" / f"{flow_run_id}.log"

    def run_of(self, flow_run_id: str) -> RunFolder:
        """The run folder of a flow run, once it is there."""

        def found() -> RunFolder | None:
            for run in self.runs():
                origin = run.path / "origin.json"
                if origin.exists() and json.loads(origin.read_text()).get("flow_run") == flow_run_id:
                    return run
            return None

        return wait_until(found, f"flow run {flow_run_id} has a run folder")  # type: ignore[no-any-return]

    # --- the doubles

    def die_in_prepare(self, name: str) -> None:
        """The next flow that prepares a run of this name is killed before there is a folder."""
        (self.root.parent / "dies-in-prepare").write_text(name)

    def plan(self, *faults: dict[str, Any]) -> None:
        """Faults of the doubles of all runs in the root from now on."""
        write_json(self.root / PLAN, list(faults))

    def hold(self, name: str, event: str = "sync.end", count: int = 2) -> None:
        """Let the next runs stand still at an event, until `release`."""
        self.plan({"id": name, "event": event, "count": count, "deeds": ["block"]})

    def release(self, name: str) -> None:
        self.plan()
        for run in self.runs():
            (run.path / FOLDER / f"go-{name}").touch()


def flow_processes(home: Path, flow_run: str = "") -> list[int]:
    """Processes of flow runs of this home, or of the one that is named."""
    found = []
    for process in psutil.process_iter():
        try:
            if "flows.up.engine" not in process.cmdline():
                continue
            its = process.environ()
            if its.get("SLIPSTREAM_HOME") == str(home) and flow_run in ("", its.get(FLOW_RUN_ENV)):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid)]
