"""The rollout process's heartbeat on storage. Rank 0 watches the process by a shared value; this one is for people."""

from typing import Any

from slipstream.process import Heartbeat, job_incarnation
from slipstream.run_folder import RunFolder

WHO = "rollout"


class StorageBeat:
    """Beats while the process lives, in a run; `progress` is the groups handed over."""

    def __init__(self, config: Any) -> None:
        run_dir = getattr(config, "run_dir", None)
        self._beat = Heartbeat(RunFolder(run_dir), WHO, config.attempt, job_incarnation()) if run_dir else None

    def start(self) -> None:
        if self._beat is not None:
            self._beat.start()

    def update(self, phase: str, progress: int) -> None:
        if self._beat is not None:
            self._beat.update(phase=phase, progress=progress)

    def stop(self) -> None:
        if self._beat is not None:
            self._beat.stop(phase="ended")
