"""What holds for every test."""

import atexit
import os
import shutil
import signal
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A background shell starts us with INT (nohup: HUP) ignored, and children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "SLIPSTREAM_HOME" not in os.environ:  # not the user's own; worker processes of xdist inherit ours
        os.environ["SLIPSTREAM_HOME"] = folder = tempfile.mkdtemp(prefix="slipstream-home-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
