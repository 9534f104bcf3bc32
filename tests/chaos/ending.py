"""How long the processes of a run outlive a cancel, as seen from outside."""

import os
import time

from slurm.bed import Bed
from tests.chaos.acts import Acts

SELDOM_S = 1.0  # between two looks while nobody has cancelled


class Ending:
    """Looked at often; remembers when a process of the jobs was seen last."""

    def __init__(self, bed: Bed, acts: Acts, user: str) -> None:
        self._bed, self._acts, self._user = bed, acts, user
        self._last = 0.0
        self.load = 1.0

    def look(self) -> None:
        """Is there a process of the user on any node? The clients on the login machine may stay."""
        cancelled = self._acts.cancelled_at is not None
        if not cancelled and time.time() - self._last < SELDOM_S:
            return
        if any(one.machine != "login" for one in self._bed.processes(self._user)):
            self._last = time.time()
            if cancelled:
                self.load = max(self.load, os.getloadavg()[0] / (os.cpu_count() or 1))

    @property
    def after_s(self) -> float | None:
        """Seconds from the cancel to the last process, to a look; None where nobody cancelled."""
        if self._acts.cancelled_at is None:
            return None
        return round(max(0.0, self._last - self._acts.cancelled_at), 1)

    def problems(self) -> list[str]:
        if self._acts.cancelled_at is not None and not self._last:
            return ["no process of the jobs was ever seen on a node"]
        return late(self.after_s, self._acts.within_s, self.load)


def late(after_s: float | None, within_s: float, load: float) -> list[str]:
    """A finding where the last process ended later than promised. Pure.

    Args:
        after_s: seconds from the cancel to the last process; None: nobody cancelled.
        within_s: seconds that are promised, of a machine whose cores are free.
        load: processes that wait for each core, at least 1: so many times longer everything may take.
    """
    if after_s is None or after_s <= within_s * load:
        return []
    return [
        f"the last process ended {after_s:g} s after the cancel, not within {within_s:g} s (load {load:.1f} per core)"
    ]
