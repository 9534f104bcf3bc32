"""How much room a folder's file system has. Standard library only."""

import shutil
from pathlib import Path

MARGIN = 1.05  # of what a checkpoint is estimated to take
LEAST_ROOM = 1 << 20  # bytes; records and exit records must find room beside a checkpoint


def existing_parent(folder: Path) -> Path:
    """`folder`, or the nearest one above it that is there."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def free_bytes(folder: Path) -> int | None:
    """Free for this user where `folder` is or will be; None where the file system does not say."""
    try:
        return shutil.disk_usage(existing_parent(folder)).free
    except OSError:
        return None


def room_for(checkpoint_bytes: float) -> float:
    """Bytes that must be free before a checkpoint of this size is begun."""
    return checkpoint_bytes * MARGIN + LEAST_ROOM


def in_words(count: float) -> str:
    """Like 1.5 GB, by powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
