"""Runs that a real worker of a real Prefect server starts, with stand-ins for server and learner."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from cluster.local_jobs import cancel_jobs, job_processes
from flows.names import instance_tag, runs_pool
from slipstream.config_file import load_config
from slipstream.process import last_lines, spawn, stop
from slipstream.run_folder import RunFolder, read_json
from tasks.lease import newest_term
from tasks.stored import all_jobs
from tests.prefect_server import PASSWORD, ROOT, PrefectServer, environment, password, request
from tests.waiting import wait_until

INSTANCE = "reconciled"
PATIENCE_S = 480.0
BUSY = 503  # SQLite is locked: Prefect's own clients ask again too
CLI = [sys.executable, "-c", "from flows.cli.main import main; main()"]


class Front:
    """A server with one deployment of the training flow, and a worker of its pool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "runs"
        for path in (folder / "prefect", folder / "home", self.root):
            path.mkdir()
        self.server = PrefectServer(folder / "prefect")
        self.worker: subprocess.Popen[bytes] | None = None
        self.deployment = ""
        self.made: list[RunFolder] = []

    @property
    def environment(self) -> dict[str, str]:
        return environment(
            PREFECT_HOME=str(self.folder / "prefect"),
            PREFECT_API_URL=self.server.url,
            PREFECT_API_AUTH_STRING=PASSWORD,
            PREFECT_WORKER_QUERY_SECONDS="1",
            PREFECT_CLIENT_MAX_RETRIES="3",
            SLIPSTREAM_HOME=str(self.folder / "home"),
            SLIPSTREAM_INSTANCE=INSTANCE,
            STANDIN_LEADERS="standins",
            STANDIN="learner:wait",
            STANDIN_DIES_IN_PREPARE=str(self.folder / "dies-in-prepare"),
        )

    def start(self) -> "Front":
        self.server.start()
        self.call("POST", "work_pools/", {"name": runs_pool(INSTANCE), "type": "process"})
        flow = self.call("POST", "flows/", {"name": "train"})
        deployment = {
            "name": f"{INSTANCE}.test",
            "flow_id": flow["id"],
            "work_pool_name": runs_pool(INSTANCE),
            "pull_steps": [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
            "entrypoint": "flows/train.py:train",
            "tags": ["slipstream", instance_tag(INSTANCE)],
            "enforce_parameter_schema": False,
        }
        self.deployment = self.call("POST", "deployments/", deployment)["id"]
        self.start_worker()
        return self

    def close(self) -> None:
        self.kill_worker()
        self.server.kill()
        for run in self.made:
            if (pid := self.leader(run)) is not None:
                _kill(pid)
            cancel_jobs(all_jobs(run), grace_s=0.1)

    def start_worker(self) -> None:
        argv = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", "--pool", runs_pool(INSTANCE)]
        self.worker = spawn(argv, self.folder / "worker.log", self.environment)

    def kill_worker(self, *runs: RunFolder) -> None:
        """Kill it together with the flows that lead the runs: none of them can tell of another's death."""
        if self.worker is None:
            return
        if self.worker.poll() is None:
            self.worker.send_signal(signal.SIGSTOP)
        for run in runs:
            self.kill_leader(run)
        stop(self.worker, 0)

    def call(self, method: str, route: str, body: Any = None) -> Any:
        return request(method, f"{self.server.url}/{route}", body, password())

    # -- runs

    def submit(self, name: str, *settings: str, run_id: str = "", **more: Any) -> tuple[str, RunFolder]:
        """A new flow run of the deployment: its id, and the run folder that it is to have."""
        values = [
            f"storage.root={self.root}",
            f"name={name}",
            "recovery.lease=6",
            "learner.step_timeout=3600",
            *settings,
        ]
        config = load_config(ROOT / "examples" / "demo.toml", values).model_dump(mode="json")
        parameters = {"config": config, "run_id": run_id}
        body = {"parameters": parameters, "state": {"type": "SCHEDULED"}, "enforce_parameter_schema": False, **more}
        flow_run = self.call("POST", f"deployments/{self.deployment}/create_flow_run", body)
        run = RunFolder(self.root / (run_id or f"{name}-{flow_run['id'].replace('-', '')[-12:]}"))
        self.made.append(run)
        return flow_run["id"], run

    def die_in_prepare(self, name: str) -> None:
        """The next flow that prepares a run of this name is killed before there is a folder."""
        (self.folder / "dies-in-prepare").write_text(name)

    def training(self, run: RunFolder, attempt: int = 1) -> RunFolder:
        """Once its learner waits for `go`, before its third step."""

        def waits() -> bool:
            beat = read_json(run.heartbeat_file("learner")) or {}
            return beat.get("attempt") == attempt and beat.get("step") == 2

        wait_until(waits, f"{run.run_id} trains: {last_lines(self.folder / 'worker.log')}", PATIENCE_S)
        return run

    def go(self, run: RunFolder) -> None:
        (run.path / "go").touch()

    def leader(self, run: RunFolder) -> int | None:
        """Process id of whoever holds the newest term, where it lives."""
        holder = read_json(run.path / "leases" / f"{newest_term(run)}.json") or {}
        return int(holder["pid"]) if holder and psutil.pid_exists(int(holder["pid"])) else None

    def kill_leader(self, run: RunFolder) -> None:
        pid = self.leader(run)
        assert pid is not None
        _kill(pid)

    def outcome(self, run: RunFolder) -> str:
        return str((read_json(run.path / "outcome.json") or {}).get("kind", ""))

    def processes(self, run: RunFolder) -> list[psutil.Process]:
        return [process for job in all_jobs(run) for process in job_processes(job)]

    # -- Prefect

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"flow_runs/{flow_run}")
        return found

    def state(self, flow_run: str) -> str:
        return str(self.flow_run(flow_run)["state_type"])

    def states(self, flow_run: str) -> list[str]:
        history = self.call("GET", f"flow_run_states/?flow_run_id={flow_run}")
        return [str(state["name"]) for state in sorted(history, key=lambda state: state["timestamp"])]

    def artifacts(self, flow_run: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("POST", "artifacts/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
        return found

    def events(self, run: RunFolder) -> set[str]:
        """Names of what was told of a run."""
        wanted = {"filter": {"resource": {"id": [f"slipstream.run.{run.run_id}"]}}}
        return {event["event"] for event in self.call("POST", "events/filter", wanted)["events"]}

    def force(self, flow_run: str, state: str, name: str, **details: Any) -> None:
        value = {"type": state, "name": name, "state_details": details}
        self.call("POST", f"flow_runs/{flow_run}/set_state", {"state": value, "force": True})

    def wait_state(self, flow_run: str, *states: str) -> dict[str, Any]:
        log = self.folder / "worker.log"
        wait_until(
            lambda: self.state(flow_run) in states, f"it is {states}, not {self.states(flow_run)}; {log}", PATIENCE_S
        )
        return self.flow_run(flow_run)

    # -- reconciliation

    def reconcile(self, *words: str, **settings: str) -> dict[str, list[dict[str, Any]]]:
        """`slipstream reconcile`, once: by run id, what it did."""
        done = subprocess.run(
            [*CLI, "reconcile", "--json", *words],
            cwd=ROOT,
            env=self.environment | settings,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in json.loads(done.stdout):
            rows.setdefault(row["run"], []).append(row)
        return rows

    def reconcile_until(self, flow_run: str, *states: str) -> dict[str, Any]:
        """Again and again, as a timer would, until the flow run is in one of the states."""

        def there() -> bool:
            self.reconcile()
            return self.state(flow_run) in states

        wait_until(there, f"{flow_run} is {states}; {self.folder}", PATIENCE_S)
        return self.flow_run(flow_run)


def _kill(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        process.kill()
        process.wait(10)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        pass
