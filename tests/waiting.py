"""Waiting for a condition, with a generous deadline."""

import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.25  # what is asked for often costs a core that the tests need


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 300) -> Any:
    """The first true value of `condition`; fails after the deadline."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_S)
    return value
