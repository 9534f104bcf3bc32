"""submitit's local executor for jobs that must outlive a Ctrl-C and must not hold the flow's terminal."""

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit.local.local import LocalExecutor, LocalJob

NEVER_MIN = 60 * 24 * 365 * 10  # submitit's local jobs cannot run without a limit


class SessionExecutor(LocalExecutor):
    """Starts each controller in a session of its own, its output in a file, with exactly the environment given.

    submitit's own controller shares the terminal's process group (Ctrl-C reaches it), inherits stdout (a Prefect worker
    would then not notice the end of the flow) and copies the whole environment (with its secrets).
    """

    def __init__(
        self, folder: str | Path, environment: Mapping[str, str], cwd: Path, setup: tuple[str, ...] = ()
    ) -> None:
        super().__init__(folder)
        self.environment = dict(environment)
        self.cwd = cwd
        self.setup = setup
        self.update_parameters(timeout_min=NEVER_MIN, tasks_per_node=1, stderr_to_stdout=True)

    @classmethod
    def name(cls) -> str:
        return "local"

    def submit_command(self, command: str) -> int:
        """Start the controller of a job that runs `command`; its process id. Raises OSError."""
        return int(self._submit_command(command).job_id)

    def _submit_command(self, command: str) -> LocalJob[Any]:
        folder = Path(self.folder)
        environment = self.environment | {
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * NEVER_MIN),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        argv = [sys.executable, "-m", "submitit.local._local", str(folder)]
        if self.setup:  # exec: the controller keeps the pid that is recorded, and gets the signals
            argv = ["bash", "-c", "\n".join(["set -e", *self.setup, "exec " + shlex.join(argv)])]
        with open(folder / "controllers.log", "ab") as log:
            process = subprocess.Popen(
                argv,
                env=environment,
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalJob(folder=folder, job_id=str(process.pid), process=process, tasks=[0])
