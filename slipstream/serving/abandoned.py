"""Whether anybody still needs a server."""

from typing import Any

from slipstream.run_folder import RunFolder, read_json

ABANDONED_S = 180.0  # a live supervisor beats every two seconds, and stops the server within as many


class Abandoned:
    """Whether nobody needs the server any more: the process that would stop the server, or start the learner again, is
    dead, and the learner has ended, or nothing was heard of it either for `idle_s` (it may wait in the queue, or its
    node died with its last words).

    A server that outlives its run would hold its GPUs until somebody notices. It is kept over attempts of the learner:
    what counts is how the newest one stands.
    """

    def __init__(self, run: RunFolder, attempt: int, idle_s: float) -> None:
        self._run = run
        self._attempt = attempt
        self._idle_s = idle_s
        self._beats: dict[str, Any] = {}
        self._since: dict[str, float] = {}
        self._ended: float | None = None

    def look(self, now: float) -> bool:
        """One look at `now` (monotonic, in seconds)."""
        try:
            beats = {who: read_json(self._run.heartbeat_file(who)) for who in ("supervisor", "learner")}
            records = [read_json(path) or {} for path in (self._run.path / "exit").glob("learner-*.json")]
            newest = max([self._attempt, *self._run.attempts(), int(self._run.assignment().get("attempt") or 0)])
        except (OSError, ValueError):  # a file system that stumbles proves nothing
            return False
        for who, beat in beats.items():
            if who not in self._since or beat != self._beats[who]:
                self._beats[who], self._since[who] = beat, now
        if not any(record.get("attempt") == newest for record in records):
            self._ended = None
        elif self._ended is None:
            self._ended = now
        silent = {who: now - since for who, since in self._since.items()}
        ended = self._ended is not None and min(silent["supervisor"], now - self._ended) > ABANDONED_S
        return ended or min(silent.values()) > max(self._idle_s, ABANDONED_S)
