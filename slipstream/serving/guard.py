"""Ends a process group when this process ends, however it ends: a parent-death signal reaches the child only, and
vLLM's engine, a grandchild, would go on for minutes."""

import contextlib
import os
import signal
import subprocess
import sys

# the pipe's other end closes with the guarded process: without a word first, the group must end
GUARD = """
import os, signal, sys
if not os.read(int(sys.argv[1]), 1):
    try:
        os.killpg(int(sys.argv[2]), signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


# a job's signals go to each of its processes; the guard inherits this mask and outlives them
BLOCKED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class Guard:
    """Kills the process group `group` (of a child that leads it) should this process end without `release`."""

    def __init__(self, group: int) -> None:
        self._group = group
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        read_end, self._pipe = os.pipe()  # the write end is not inherited by later children
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", GUARD, str(read_end), str(group)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(read_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._pipe)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            raise
        finally:
            os.close(read_end)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def release(self) -> None:
        """The group has ended: nothing is to be killed any more. Idempotent."""
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, b"x")
            os.close(self._pipe)
            self._pipe = -1
            self._process.wait()
