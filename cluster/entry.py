"""What runs inside a job: a stable entry point with plain arguments, so nothing that matters is frozen in a pickle."""

import importlib
import os
import signal
import traceback
from pathlib import Path

from slipstream.process import die_with_parent, new_incarnation, write_exit
from slipstream.run_folder import RunFolder

# role -> module:function of its leader, called with (run_dir, attempt), returning the exit code
LEADERS = {
    "server": "slipstream.serving.main:run",
    "learner": "slipstream.learner.leader:run",
}


def run_role(role: str, run_dir: str, attempt: int, leader: str) -> None:
    """Run the leader of `role` in this process; never returns (raises SystemExit with the leader's exit code)."""
    # submitit's own handler ignores TERM; until the leader has installed its own, TERM simply ends the process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.environ.get("SUBMITIT_EXECUTOR") == "local":
        die_with_parent(int(os.environ["SUBMITIT_LOCAL_JOB_ID"]), signal.SIGTERM)
    module, _, function = leader.partition(":")
    try:
        code = int(getattr(importlib.import_module(module), function)(Path(run_dir), attempt))
    except Exception as error:
        traceback.print_exc()
        _record_crash(RunFolder(run_dir), role, attempt, error)
        raise SystemExit(1) from None
    raise SystemExit(code)


def _record_crash(run: RunFolder, role: str, attempt: int, error: Exception) -> None:
    log = run.logs / f"{role}-{attempt}-crash.log"
    log.write_text("".join(traceback.format_exception(error)))
    write_exit(run, role, new_incarnation(), attempt, 1, f"{type(error).__name__}: {error}", log)
