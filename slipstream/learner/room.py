"""Room on the storage: what a checkpoint takes, and whether that much is free."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from slipstream.learner.checkpoint import MARKER, NotWritten
from slipstream.run_folder import read_json
from slipstream.storage import free_bytes, in_words, room_for


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def estimated_bytes(model: Any, optimizer: Any) -> int:
    """What a checkpoint of this model and optimizer takes, as they are now; of an adapter only what is trained.

    A sharded tensor counts whole: all ranks write to the same storage.
    """
    saved = (p for p in model.parameters() if p.requires_grad or not hasattr(model, "peft_config"))
    states = getattr(optimizer, "state", None) or {}
    return _bytes(saved) + _bytes(value for state in states.values() for value in state.values())


def written_bytes(checkpoint: Path) -> int:
    """What a sealed checkpoint takes, by its marker; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return sum(int(entry["bytes"]) for entry in (read_json(checkpoint / MARKER) or {"files": {}})["files"].values())
    return 0


def check_room(folder: Path, needed: int, step: int) -> None:
    """Raise NotWritten where `folder` has no room for a checkpoint of `needed` bytes. Nothing is written."""
    _check(folder, needed, f"the checkpoint of step {step}", "the one before it is untouched")


def check_final_room(folder: Path, model: Any) -> None:
    """Raise NotWritten where `folder` has no room for the trained model. Nothing is written."""
    _check(folder, estimated_bytes(model, None), "the trained model", "the last checkpoint is untouched")


def _check(folder: Path, needed: int, what: str, left: str) -> None:
    free = free_bytes(folder)
    if free is None or free >= room_for(needed):
        return
    raise NotWritten(
        f"{what} was not begun: it takes about {in_words(needed)}, and {folder} has {in_words(free)} free; {left}: make "
        "room, then resume"
    )
