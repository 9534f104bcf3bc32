"""One bed for the whole session; tests that need SLURM skip, with the reason, where none can be had."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.bed import Bed, unusable
from slurm.bed.bed import down


@pytest.fixture(scope="session")
def bed_possible() -> None:
    """Skips where this machine cannot have a bed."""
    if reason := unusable():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def session_bed(bed_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    bed = Bed.up(tmp_path_factory.mktemp("slurm") / "bed", grace_seconds=2, owner=os.getpid())
    yield bed
    bed.down()


@pytest.fixture
def bed(session_bed: Bed) -> Bed:
    """Six idle nodes with eight GPUs each, without jobs, network whole, every daemon up."""
    restore(session_bed)
    return session_bed


def restore(bed: Bed) -> None:
    """Undoes what the test before may have left."""
    description = bed.description
    on = bed.machines_on()
    if "ctl" not in on:
        bed.power_on("ctl")
    elif "is UP" not in bed.command("sh", "-c", "scontrol ping || true"):
        bed.start_controller()
    for name in description.node_names:
        if name not in on:
            bed.power_on(name)
        else:
            bed.heal(name)
    for user in (*description.users, "root"):
        bed.command("scancel", "--user", user)
    states = bed.node_states()
    for name in description.node_names:
        if "drain" in states[name]:
            bed.resume(name)
    bed.wait_nodes("idle", description.node_names, 120)
    for storage in (bed.limited, bed.readonly):
        bed.storage(storage.name, "rw")
        for path in storage.iterdir():
            path.unlink() if path.is_file() else shutil.rmtree(path)
    bed.storage("limited", str(description.limited_mb))
    bed.storage("readonly", "ro")


@pytest.fixture
def bed_folder(bed_possible: None, tmp_path: Path) -> Iterator[Path]:
    """A folder for a bed of a test's own; ended afterwards."""
    yield tmp_path / "bed"
    down(tmp_path / "bed")
