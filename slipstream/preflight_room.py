"""Is there room for the checkpoints? From the headers of a model's weight files; no torch."""

import json
import math
from pathlib import Path

from slipstream.config_file import Problem
from slipstream.preflight_model import ModelFiles
from slipstream.run_config import RunConfig
from slipstream.storage import free_bytes, in_words, room_for

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
STORED = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
ADAM_MOMENTS = 2


def checkpoint_bytes(model: ModelFiles, config: RunConfig) -> int | None:
    """What a checkpoint takes at least: all weights, and AdamW's two moments of each. None where it cannot be told.

    Of an adapter nothing is said: it is small. Files that are not here, and such as are no safetensors, say nothing.
    """
    if config.learner.use_lora or not model.complete:
        return None
    numbers = itemsize = 0
    try:
        for path in sorted(model.folder.glob("*.safetensors")):
            if not path.name.startswith(("adapter_", "training_")):
                found, stored = _contents(path)
                numbers, itemsize = numbers + found, max(itemsize, stored)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    itemsize = BYTES.get(config.model.dtype, itemsize)
    return numbers * itemsize * (1 + ADAM_MOMENTS) or None


def _contents(path: Path) -> tuple[int, int]:
    """Numbers in a safetensors file, and the bytes of the widest of them."""
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is cut short")
        header = json.loads(stream.read(length))
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    count = sum(math.prod(entry["shape"]) for entry in tensors)
    return count, max((STORED.get(entry["dtype"], 0) for entry in tensors), default=0)


def room_problems(model: ModelFiles, config: RunConfig) -> list[Problem]:
    """An error where not even one checkpoint fits, a warning where those that are kept at once may not."""
    size, root = checkpoint_bytes(model, config), config.storage.root
    free = free_bytes(Path(root).expanduser().absolute())
    if size is None or free is None:
        return []
    takes = f"one checkpoint takes about {in_words(size)} (weights and AdamW's state), and {in_words(free)} are free"
    if free < room_for(size):
        return [Problem("storage.root", root, f"{takes}: make room, or choose another folder")]
    limit = config.trainer.save_total_limit
    if limit is None or free >= room_for(size * (limit + 1)):
        return []
    message = (
        f"{takes}; with trainer.save_total_limit = {limit} there are up to {limit + 1} at once, "
        f"{in_words(size * (limit + 1))}: make room, choose another folder, or lower the limit"
    )
    return [Problem("storage.root", root, message, "warning")]
