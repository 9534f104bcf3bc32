"""Verifiers in child processes, with limits: what a model writes must not be able to hang or end the rollout process.

Symbolic verifiers evaluate what the model wrote (`9**9**9` is enough to hang one, holding the interpreter's lock), and
math-verify's own time limit is a signal, which works in a main thread only. So each verdict is asked of a child over a
pipe: one JSON line there, one back. A child limits itself, by timers whose signals the kernel acts on, and ends when
its pipe closes, so none outlives its parent. A dead child is replaced.
"""

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

CPU_LIMIT_S = 3.0  # processor time per verdict: fair on a busy machine
WALL_LIMIT_S = 60.0  # for a verifier that waits instead of computing
MEMORY_LIMIT_BYTES = 4 << 30
TEXT_LIMIT = 20_000  # characters of a completion's end that a verifier sees
ENVIRONMENT_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHOME")
JUDGES = max(1, min(4, (os.cpu_count() or 2) // 2))


class JudgeError(RuntimeError):
    """A verifier cannot work at all: it does not start, or a row lacks what it needs."""


class _Judge:
    """One child process; used by one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, verifier: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """The child's reply, or None where it exceeded a limit."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([verifier, request]).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        code = process.wait()  # the pipe is closed: it is ending
        self.stop()
        if code >= 0:
            raise JudgeError(f"the verifier process ended by itself with exit code {code}")
        return None

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.rewards.judge_main", str(CPU_LIMIT_S), str(WALL_LIMIT_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            code = self._process.wait()
            self._process = None
            raise JudgeError(f"the verifier process does not start: {sys.executable} exited with {code}")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """Of a child: no secrets for what a model wrote to find, one thread."""
    kept = {name: value for name, value in os.environ.items() if name in ENVIRONMENT_KEPT}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class _Pool:
    def __init__(self) -> None:
        self._free: queue.LifoQueue[_Judge] = queue.LifoQueue()
        self.judges = [_Judge() for _ in range(JUDGES)]
        for one in self.judges:
            self._free.put(one)

    def ask_all(self, verifier: str, requests: Sequence[dict[str, Any]]) -> list[float | None]:
        one = self._free.get()
        try:
            return [_verdict(one.ask(verifier, request)) for request in requests]
        finally:
            self._free.put(one)


def _verdict(reply: dict[str, Any] | None) -> float | None:
    if reply is None:
        return 0.0
    if "error" in reply:
        raise JudgeError(reply["error"])
    return reply["score"]


_pool: _Pool | None = None
_pool_pid = 0
_lock = threading.Lock()


def judge(verifier: str, requests: Sequence[dict[str, Any]]) -> list[float | None]:
    """One score per request, in order: 0.0 where a limit was exceeded, None where there is no verdict.

    Works in any thread; up to `JUDGES` calls run at once, the others wait. Raises JudgeError where the verifier cannot
    work at all.
    """
    global _pool, _pool_pid
    with _lock:
        if _pool is None or _pool_pid != os.getpid():  # a forked process must not share its parent's pipes
            _pool, _pool_pid = _Pool(), os.getpid()
        pool = _pool
    return pool.ask_all(verifier, requests)


@atexit.register
def _stop_all() -> None:
    if _pool is not None and _pool_pid == os.getpid():
        for one in _pool.judges:
            one.stop()
