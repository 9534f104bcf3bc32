"""Starts a program that hears nothing of the network's interfaces: `python deaf.py PROGRAM ARGUMENTS…`.

Chromium drops what it loads (ERR_NETWORK_CHANGED) whenever an address comes or goes on this machine, also from loopback,
and the SLURM test bed's bridge and cables do that all the time. It has no switch for that; without netlink it never knows.
Where the kernel has no such filter it hears all.
"""

import contextlib
import ctypes
import os
import platform
import struct
import sys

SOCKET = {"x86_64": 41, "aarch64": 198}  # the system call's number
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF: of 32 bits, jump if equal, return
NUMBER_AT, FIRST_ARGUMENT_AT = 0, 16  # in seccomp_data
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # the latter with an errno


class Program(ctypes.Structure):
    """sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def be_deaf() -> None:
    """Refuse netlink sockets to this process and all that it starts. Raises OSError."""
    number = SOCKET.get(platform.machine())
    if number is None:
        return
    steps = [
        (LOAD, 0, 0, NUMBER_AT),
        (EQUAL, 0, 3, number),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (EQUAL, 0, 1, 16),  # AF_NETLINK
        (RETURN, 0, 0, REFUSE | 97),  # EAFNOSUPPORT
        (RETURN, 0, 0, ALLOW),
    ]
    program = Program(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*words):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        be_deaf()
    os.execvp(sys.argv[1], sys.argv[1:])
