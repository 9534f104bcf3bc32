"""Reward functions that tests name in a configuration."""

import threading
import time
from pathlib import Path
from typing import Any

_one_at_a_time = threading.Lock()


def low_bytes(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of even token ids: differs between almost any two rollouts of a random model."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]


def paced_low_bytes(completion_ids: list[list[int]], pace_file: list[str], **_: Any) -> list[float]:
    """`low_bytes`, one group at a time, each as many seconds as the file says that the prompt names."""
    with _one_at_a_time:
        time.sleep(float(Path(pace_file[0]).read_text() or 0))
    return low_bytes(completion_ids)


def unlucky(**_: Any) -> list[float]:
    """Raises, whatever it is given."""
    raise RuntimeError("out of luck")
