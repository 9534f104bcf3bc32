"""Whether anybody still needs a server."""

from typing import Any

from slipstream.run_folder import RunFolder, read_json

ABANDONED_S = 180.0  # a live supervisor beats every two seconds, and stops the server within as many


class Abandoned:
    """Whether nobody needs the server any more: the learner has ended, and the process that would stop the server, or
    start the learner again, is dead.

    A server that outlives its run would hold its GPUs until somebody notices. It is kept over attempts of the learner:
    what counts is how the newest one stands.
    """

    def __init__(self, run: RunFolder, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._beat: Any = None
        self._since: float | None = None

    def look(self, now: float) -> bool:
        """One look at `now` (monotonic, in seconds); True once both have held for `ABANDONED_S`."""
        try:
            beat = read_json(self._run.heartbeat_file("supervisor"))
            records = [read_json(path) or {} for path in (self._run.path / "exit").glob("learner-*.json")]
            newest = max([self._attempt, *self._run.attempts(), int(self._run.assignment().get("attempt") or 0)])
        except (OSError, ValueError):  # a file system that stumbles proves nothing
            return False
        ended = any(record.get("attempt") == newest for record in records)
        if not ended or beat != self._beat:
            self._beat, self._since = beat, None
        if ended and self._since is None:
            self._since = now
        return self._since is not None and now - self._since > ABANDONED_S
