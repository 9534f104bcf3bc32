"""`slipstream up`: a Prefect server on loopback, our deployments on it, and the workers, looked after until a signal.

Its end ends the server and the workers, and nothing else: flow processes lead their runs without either, and jobs need
nobody. Imports no prefect: that is for the children.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx
import psutil

from flows.cli.plain import HOME
from flows.connection import Connection, PrefectRefused, connect
from flows.names import care_pool, runs_pool
from flows.prefect_api import QUIET, PrefectUnavailable
from flows.up import state as up_state
from flows.up.supervised import Supervised, rotate
from slipstream.instance import HOME_ENV, INSTANCE_ENV, home, instance_id
from slipstream.process import last_lines
from tasks.interrupt import handling

START_TIMEOUT_S = 300.0
DEPLOY_TIMEOUT_S = 300.0
LOOK_S = 0.5
ROTATE_S = 60.0
WORKER_STARTED = " started!"
FLOW_NAME_ENV = "PREFECT__FLOW_NAME"  # a worker gives it to the processes that it starts
RECONCILE = "reconcile"
# Prefect's page asks a tracker for its settings even where analytics are off: a browser must ask us alone.
PAGE_STAYS_HERE = ["--header", "Content-Security-Policy:connect-src 'self'; frame-ancestors 'none'; object-src 'none'"]
SERVER, WORKERS = "server", "workers"
KEPT_SETTINGS = ("PREFECT_SERVER_", "PREFECT_API_DATABASE_", "PREFECT_LOGGING_")
COMMAND = [sys.executable, "-m", "flows.cli.main"]


class Ended(Exception):
    """A signal asked us to end."""


@dataclass(frozen=True)
class Asked:
    """How `slipstream up` was called.

    Attributes:
        parts: of ("server", "workers").
        port: None: the one of last time, else 4200, else a free one; 0: any free one.
        deploy: further words of `slipstream deploy`.
    """

    parts: Sequence[str] = (SERVER, WORKERS)
    port: int | None = None
    deploy: Sequence[str] = ()


def base_environment() -> dict[str, str]:
    """Ours, without settings of another Prefect server or account, which must not reach this one's processes."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PREFECT_") or name.startswith(KEPT_SETTINGS)
    }
    auth = up_state.auth_string()
    return (
        kept
        | QUIET
        | {
            "PREFECT_HOME": str(up_state.prefect_home()),
            "PREFECT_SERVER_API_AUTH_STRING": auth,
            "PREFECT_API_AUTH_STRING": auth,
            HOME_ENV: str(home()),
            INSTANCE_ENV: instance_id(),
        }
    )


# Ours unless the user has set others. On a busy machine SQLite needs patience; old flow runs go from the database (never
# from storage), or a look each minute would fill it.
SERVER_DEFAULTS = {
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # In memory, a lease of a pass of reconciliation that died with the server would hold its only slot for ever.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
}


def server_environment() -> dict[str, str]:
    """For the server.

    The page asks the address that it came from, so that a tunnel may have any port. Its files are copied into our own folder:
    Prefect would put them beside its code, and only the user that was first could read them there.
    """
    ours = {
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_UI_STATIC_DIRECTORY": str(up_state.prefect_home() / "ui"),
        "PREFECT__SERVER_FINAL": "1",
    }
    return SERVER_DEFAULTS | base_environment() | ours


def client_environment(url: str) -> dict[str, str]:
    """For the workers, and through them for flow processes; a run is picked up seconds after it was submitted."""
    return base_environment() | {"PREFECT_API_URL": url, "PREFECT_WORKER_QUERY_SECONDS": "2"}


def worker_environment(url: str) -> dict[str, str]:
    """For workers of a server that somebody else runs: as it is configured here."""
    return {**os.environ, "PREFECT_API_URL": url, "PREFECT_WORKER_QUERY_SECONDS": "2", INSTANCE_ENV: instance_id()}


class Upholder:
    """Starts the parts, tells how far it is, and looks after them."""

    def __init__(self, asked: Asked, say: Callable[[str], None], step: Callable[[str], None]) -> None:
        self._asked, self._say, self._step = asked, say, step
        self._children: list[Supervised] = []
        self._ending = False

    def run(self) -> int:
        """Until a signal; the exit code. Raises UpError, PrefectUnavailable, OSError."""
        with up_state.holding(self._asked.parts) as free, handling(self._on_signal):
            if missing := [part for part in self._asked.parts if part not in free]:
                return self._runs_already(missing)
            try:
                self._begin()
                self._uphold()
            except Ended:
                pass
            finally:
                self._stop()
        return 0

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self._ending:  # a second one must not break the way out
            self._ending = True
            raise Ended

    def _runs_already(self, parts: Sequence[str]) -> int:
        for part in parts:
            self._say(f"`slipstream up` runs already (the {part}: {up_state.holder(part) or 'just ended'})")
        up = up_state.read_up()
        self._say(f"  {up.ui}" if up else "  it is starting: its address will be shown there")
        return 0

    def _begin(self) -> None:
        if SERVER in self._asked.parts:
            up = up_state.read_up()
            if up is not None and up.host != socket.gethostname():
                raise up_state.UpError(
                    f"`slipstream up` runs on {up.host}, with the same folder {home()}, and two servers must not share a "
                    f"database: end it there (slipstream down), or remove {home() / 'up.json'} where {up.host} is gone"
                )
            before = up_state.last_port()
            with contextlib.closing(up_state.listen(self._asked.port)) as listener:
                port = listener.getsockname()[1]
                self._listener = listener.dup()
            if before not in (None, port) and self._asked.port is None:
                self._say(f"port {before} is taken, so it is {port} from now on (--port chooses)")
            ui = f"http://{up_state.LOOPBACK}:{port}"
            url = f"{ui}/api"
            self._start_server(url)
            up_state.write_up(url, ui, ready=False)
            environment = client_environment(url)
            self._deploy(environment)
        else:
            self._step("looking for the Prefect server")
            connection = self._wait_for_server()
            url, ui = connection.url, connection.url.removesuffix("/api")
            environment = client_environment(url) if connection.local else worker_environment(url)
        if WORKERS in self._asked.parts:
            self._start_workers(environment)
        if SERVER in self._asked.parts:
            up_state.write_up(url, ui, ready=True)
        self._step("")
        self._say(self._banner(ui))

    def _add(self, name: str, argv: Sequence[str], env: dict[str, str], fds: Sequence[int] = ()) -> Supervised:
        child = Supervised(name, argv, env, up_state.logs() / f"{name.replace(' ', '-')}.log", self._say, HOME, fds)
        self._children.append(child)
        child.start()
        return child

    def _start_server(self, url: str) -> None:
        up_state.prefect_home().mkdir(mode=0o700, exist_ok=True)
        up_state.logs().mkdir(mode=0o700, exist_ok=True)
        fd = self._listener.fileno()
        argv = [sys.executable, "-m", "uvicorn", "--factory", "flows.up.server:create_app"]
        argv += ["--fd", str(fd), "--log-level", "warning", "--timeout-graceful-shutdown", "3", *PAGE_STAYS_HERE]
        self._step("starting the Prefect server (about 15 s)")
        server = self._add("server", argv, server_environment(), [fd])
        end = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(trust_env=False, timeout=2) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{url}/health").status_code == 200:
                        return
                process = server.process
                if process is None or process.poll() is not None or time.monotonic() > end:
                    raise PrefectUnavailable(
                        f"the Prefect server did not start\n--- last lines of {server.log}\n{last_lines(server.log)}"
                    )
                time.sleep(0.1)

    def _wait_for_server(self) -> Connection:
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return connect()
            except PrefectRefused:
                raise
            except PrefectUnavailable:
                if time.monotonic() > end:
                    raise
                time.sleep(2)

    def _deploy(self, environment: dict[str, str]) -> None:
        self._step("registering the deployments")
        log = up_state.logs() / "deploy.log"
        rotate(log)
        argv = [*COMMAND, "deploy", *self._asked.deploy]
        with open(log, "ab") as out:
            log.chmod(0o600)
            child = subprocess.Popen(
                argv,
                cwd=HOME,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code: int | None
        try:
            code = child.wait(DEPLOY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            child.kill()
            child.wait()
        if code != 0:
            late = f" within {DEPLOY_TIMEOUT_S:g} s" if code is None else ""
            raise PrefectUnavailable(f"the deployments could not be registered{late}\n--- {log}\n{last_lines(log)}")

    def _start_workers(self, environment: dict[str, str]) -> None:
        self._step("starting the workers")
        instance = instance_id()
        workers = []
        for name, pool in (("worker", runs_pool(instance)), ("care worker", care_pool(instance))):
            log = up_state.logs() / f"{name.replace(' ', '-')}.log"
            before = log.stat().st_size if log.exists() else 0
            workers.append((self._add(name, [sys.executable, "-m", "flows.up.worker", pool], environment), before))
        end = time.monotonic() + START_TIMEOUT_S
        while not all(_said(child.log, before) for child, before in workers):
            if time.monotonic() > end:
                raise PrefectUnavailable(f"the workers did not start: look at {up_state.logs()}")
            self._look()

    def _look(self) -> None:
        for child in self._children:
            child.look()
        time.sleep(LOOK_S)

    def _uphold(self) -> None:
        rotated = time.monotonic()
        while True:
            self._look()
            if time.monotonic() - rotated > ROTATE_S:
                rotated = time.monotonic()
                with contextlib.suppress(OSError):
                    for log in up_state.logs().rglob("*.log"):
                        rotate(log)

    def _stop(self) -> None:
        self._step("ending")
        for child in reversed(self._children):  # the workers first: without a server they would complain
            with contextlib.suppress(OSError):
                child.stop()
        if SERVER in self._asked.parts and (up := up_state.read_up()) and up.pid == os.getpid():
            up_state.forget_up()
        self._step("")
        if self._children:
            self._say(farewell(flow_processes()))

    def _banner(self, ui: str) -> str:
        lines = [f"slipstream is up (instance {instance_id()})"]
        if SERVER in self._asked.parts:
            port = ui.rpartition(":")[2]
            lines += [
                f"  page       {ui}",
                f"  log in     with the text in {up_state.auth_file()} (cat it; nobody else can read it)",
                f"  from afar  ssh -L {port}:{up_state.LOOPBACK}:{port} {socket.gethostname()}, then {ui}",
            ]
        lines += [
            f"  logs       {up_state.logs()}",
            "  end        Ctrl-C or `slipstream down`; runs and their jobs go on",
        ]
        return "\n".join(lines)


def _said(log: Path, before: int) -> bool:
    """Whether a worker has written that it has started, since the log had `before` bytes."""
    try:
        with open(log, "rb") as file:
            file.seek(before)
            return WORKER_STARTED.encode() in file.read()
    except OSError:
        return False


def flow_processes() -> list[int]:
    """Processes of runs and sweeps of this instance's folder on this host; a pass of reconciliation is none."""
    found = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        with contextlib.suppress(psutil.Error):
            words = process.info["cmdline"] or []
            if "flows.up.engine" in words and process.info["uids"].real == os.getuid():
                environment = process.environ()
                if environment.get(HOME_ENV) == str(home()) and environment.get(FLOW_NAME_ENV) != RECONCILE:
                    found.append(process.pid)
    return sorted(found)


def farewell(processes: Sequence[int]) -> str:
    """What is said at the end."""
    text = "the server and the workers have ended; no run and no job was ended"
    if processes:
        count = len(processes)
        text += f"\n  {count} run{'s go' if count > 1 else ' goes'} on: process{'es' if count > 1 else ''} "
        text += ", ".join(map(str, processes))
    return text


def bring_down(say: Callable[[str], None], patience_s: float = 60.0) -> int:
    """End what `slipstream up` runs on this host; the exit code. Raises UpError where it does not end."""
    holders = {part: found for part in (WORKERS, SERVER) if (found := up_state.holder(part))}
    for found in holders.values():
        if not found.is_here:  # its number is another process's here
            raise up_state.UpError(f"`slipstream up` runs on {found.host}: run `slipstream down` there")
    processes = {part: found.pid for part, found in holders.items() if found.pid}
    if not processes:
        up = None
        with contextlib.suppress(up_state.UpError):  # a damaged file is removed
            up = up_state.read_up()
        if up is not None and up.host != socket.gethostname():
            raise up_state.UpError(f"`slipstream up` runs on {up.host}: run `slipstream down` there")
        up_state.forget_up()
        say("`slipstream up` does not run here")
        return 0
    for pid in sorted(set(processes.values())):
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + patience_s
    while any((found := up_state.holder(part)) and found.pid == pid for part, pid in processes.items()):
        if time.monotonic() > end:
            raise up_state.UpError(
                f"process {sorted(set(processes.values()))} has not ended yet: look at {up_state.logs()}"
            )
        time.sleep(0.1)
    say(farewell(flow_processes()))
    return 0
