"""Ranks in lock-step with rank 0 over TCP: one that is killed or stopped ends or stops the others, as a collective does."""

import json
import socket
import time
from typing import Any

from slipstream.run_folder import RunFolder, read_json, write_json
from tests.doubles.jobs import host

MEETING_S = 120.0


class Lost(RuntimeError):
    """Another rank has gone."""


class _Line:
    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rwb")

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(message).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise Lost(f"connection closed by peer: {error}") from error

    def receive(self) -> dict[str, Any]:
        try:
            text = self._file.readline()
        except OSError as error:
            raise Lost(f"connection closed by peer: {error}") from error
        if not text:
            raise Lost("connection closed by peer")
        return dict(json.loads(text))


class Hub:
    """Rank 0's end: every command is answered by all before it returns."""

    def __init__(self, run: RunFolder, incarnation: str, world: int) -> None:
        self._lines: dict[int, _Line] = {}
        with socket.create_server((host(), 0)) as server:
            server.settimeout(MEETING_S)
            write_json(run.meeting_file(incarnation), {"host": host(), "port": server.getsockname()[1]})
            while len(self._lines) < world - 1:
                connection, _ = server.accept()
                connection.settimeout(None)
                line = _Line(connection)
                self._lines[int(line.receive()["rank"])] = line

    def all(self, **command: Any) -> None:
        for line in self._lines.values():
            line.send(command)
        for line in self._lines.values():
            line.receive()

    def release(self, **command: Any) -> None:
        """A last command, which is not answered."""
        for line in self._lines.values():
            line.send(command)


def join(run: RunFolder, incarnation: str, rank: int) -> _Line:
    """Another rank's end."""
    end = time.monotonic() + MEETING_S
    while time.monotonic() < end:
        if meeting := read_json(run.meeting_file(incarnation)):
            connection = socket.create_connection((meeting["host"], meeting["port"]), 10)
            connection.settimeout(None)  # as long as a step may take
            line = _Line(connection)
            line.send({"rank": rank})
            return line
        time.sleep(0.05)
    raise Lost(f"rank 0 did not say where it is within {MEETING_S:g} s")
