"""A Prefect server on the login machine of a bed, which only that machine reaches; and asking it from there.

`python -m tests.bed_prefect URL METHOD ROUTE JSON` asks, and prints the answer.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from slurm.bed import Bed, BedError
from slurm.bed.bed import ROOT
from slurm.bed.machines import inside
from tests.prefect_server import PASSWORD, PATIENCE_S, STANDINS
from tests.waiting import wait_until

PYTHON = str(ROOT / ".venv" / "bin" / "python")
URL = "http://127.0.0.1:4200/api"
USER = "bed1"


class BedPrefect:
    """Server, workers and commands of `bed1`, their words in `folder`/prefect.log."""

    def __init__(self, bed: Bed, folder: Path, **environment: str) -> None:
        self.bed = bed
        self.folder = folder
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PYTHONPATH": f"{STANDINS}:{ROOT}",
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": URL,
            "PREFECT_API_AUTH_STRING": PASSWORD,
            "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "SLIPSTREAM_HOME": str(folder / "home"),
            **environment,
        }
        self._log = open(folder / "prefect.log", "a")  # noqa: SIM115
        self.started: list[subprocess.Popen[str]] = []

    def popen(self, *words: str) -> "subprocess.Popen[str]":
        process = self.bed.popen(
            "login", words, user=USER, cwd=str(ROOT), env=self.environment, stdout=self._log, stderr=subprocess.STDOUT
        )
        self.started.append(process)
        return process

    def start(self) -> None:
        self.popen(PYTHON, "-m", "prefect", "server", "start", "--no-ui", "--host", "127.0.0.1", "--port", "4200")
        wait_until(self._answers, f"the server starts: {self._log.name}", PATIENCE_S)

    def _answers(self) -> bool:
        try:
            self.call("POST", "flows/count", {})
            return True
        except BedError:
            time.sleep(1)
            return False

    def call(self, method: str, route: str, body: Any = None) -> Any:
        words = [PYTHON, "-m", "tests.bed_prefect", URL, method, route, json.dumps(body)]
        said = self.bed.run("login", words, user=USER, cwd=str(ROOT), env=self.environment)
        return json.loads(said)

    def kill(self, process: "subprocess.Popen[str]") -> None:
        """SIGKILL to a command on the login machine, and nothing else."""
        pid = inside(process.pid)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        process.wait(60)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
        self._log.close()


def main(url: str, method: str, route: str, body: str) -> int:
    user, _, secret = PASSWORD.partition(":")
    answer = httpx.request(method, f"{url}/{route}", json=json.loads(body), auth=(user, secret), timeout=60)
    answer.raise_for_status()
    print(json.dumps(answer.json() if answer.content else None))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
