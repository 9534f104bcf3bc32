"""Trainings that end in the middle of their second checkpoint, each in a forked process: killed, or out of room.

python -m tests.standins.learner_killed FOLDER: what happened in FOLDER/<point>, and why in FOLDER/<point>.json.
"""

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from slipstream.learner import checkpoint as ckpt
from tests.learner_replay import ReplayTrainer
from tests.learner_resume import new_trainer

STEP = 4  # the second checkpoint
LIMITS = {"full: weights": 4 << 10, "full: optimizer": 80 << 10}  # bytes: below the weights' size; above it
KILLED = ["killed: weights", "killed: state", "killed: marker", "killed: rotation"]


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(ReplayTrainer):
    """Ends at a point of the checkpoint of `STEP`."""

    point = ""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.global_step == STEP:
            self._arm()
        super()._save_checkpoint(model, trial)

    def _arm(self) -> None:
        if self.point in LIMITS:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMITS[self.point], resource.RLIM_INFINITY))
        elif self.point == "killed: weights":  # the weights are there, the optimizer is not
            self._save_optimizer_and_scheduler = die  # type: ignore[method-assign]
        elif self.point == "killed: state":  # everything is there but the marker
            ckpt.seal = die
        elif self.point == "killed: marker":  # the marker is written but not in its place
            os.replace = self._die_at_marker
        else:  # the new one is complete, the old one half deleted
            shutil.rmtree = self._half_delete  # type: ignore[assignment]

    _replace = staticmethod(os.replace)

    def _die_at_marker(self, source: Any, target: Any) -> None:
        if Path(target).name == ckpt.MARKER:
            die()
        self._replace(source, target)

    def _half_delete(self, path: Path, **_: Any) -> None:
        (path / "model.safetensors").unlink()
        die()


def attempt(folder: Path, point: str) -> None:
    trainer = new_trainer(folder / point, 6, save_total_limit=1, kind=Dying)
    trainer.point = point
    outcome = {"raised": "", "message": ""}
    try:
        trainer.train()
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        outcome = {"raised": type(error).__name__, "message": str(error)}
    (folder / f"{point}.json").write_text(json.dumps(outcome))


def main(folder: Path) -> None:
    for point in [*LIMITS, *KILLED]:
        child = os.fork()  # nothing has been computed yet, so there are no threads that a fork would lose
        if child == 0:
            attempt(folder, point)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"{point}: {'killed' if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
