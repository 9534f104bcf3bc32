"""What a run left behind on a test bed."""

import time
from collections.abc import Callable

from slurm.bed.bed import Bed

BACK_S = 180.0  # until SLURM takes a node back that answers again


def left(bed: Bed, user: str, within_s: float, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
    """Jobs and processes of the user that are still there after a while.

    A node that was cut off runs its batch script until SLURM, which gave its job up, takes the node back.
    `meanwhile` is called at every look.
    """
    end = time.monotonic() + BACK_S
    while time.monotonic() < end:
        meanwhile()
        states = bed.node_states()
        if not any(states.get(one.machine, "").startswith("down") for one in bed.processes(user)):
            break
        time.sleep(0.5)
    end = time.monotonic() + within_s
    while True:
        meanwhile()
        jobs = bed.command("squeue", "-h", "-u", user, "-o", "%i %j %T").splitlines()
        there = [f"in the queue: {line}" for line in jobs]
        there += [f"running: {one.machine}: {one.command[:80]}" for one in bed.processes(user)]
        if not there or time.monotonic() > end:
            return there
        time.sleep(0.3)
