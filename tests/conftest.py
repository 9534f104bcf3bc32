"""What holds for every test."""

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A background shell starts us with INT (nohup: HUP) ignored, and children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
