"""What starts the browser of the tests: it keeps netlink from a program, and nothing else."""

import platform
import subprocess
import sys

import pytest

from tests.browser import deaf

OPENS = """
import socket
socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()
try:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()
    print("hears")
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.skipif(platform.machine() not in deaf.SOCKET, reason="no filter for this kind of machine")
def test_a_program_gets_no_netlink_socket() -> None:
    def said(*before: str) -> str:
        done = subprocess.run([*before, sys.executable, "-c", OPENS], text=True, capture_output=True, check=True)
        return done.stdout.strip()

    assert said() == "hears"
    if subprocess.run([sys.executable, "-c", "from tests.browser.deaf import be_deaf; be_deaf()"]).returncode:
        pytest.skip("this kernel has no such filter")
    assert said(sys.executable, "-I", "-S", deaf.__file__) == "Address family not supported by protocol"
