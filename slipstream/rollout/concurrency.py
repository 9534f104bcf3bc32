"""How many rollouts may be in flight, following the server's load. A pure state machine: no tasks, no clients.

The contract:

- The cap is a number of rollouts, never below one group and never above `max_concurrent_rollouts`. Where a limit is below
  one group, one group is the cap: less could not start at all.
- It starts at the number of requests that the KV cache holds at full length, so that the server is not overloaded before
  anything is known. Where the server tells neither its cache nor its load, it is `max_concurrent_rollouts` and stays there.
- It grows by a quarter when the cache is used by less than 60 % and no request waits, at most once per cap-many finished
  rollouts: by then the last growth shows in the load.
- It shrinks by 30 % when the cache is used by more than 80 %. Rollouts in flight go on; only new ones wait. So usage stays
  high for a while after a cut, and a further cut waits until the rollouts in flight have come down to the cap: otherwise
  a poll every few seconds would end at one group before the first cut had any effect.
- Between the two nothing changes, nor when a poll brings no answer.
"""

from dataclasses import dataclass

GROW_BELOW = 0.6  # of the KV cache: room for a quarter more, with a margin for longer answers
SHRINK_ABOVE = 0.8  # vLLM preempts and repeats requests once the cache is full; requests in flight still grow
GROWTH = 1.25  # slow enough to be seen in the load before the next step
SHRINKAGE = 0.7


@dataclass(frozen=True)
class ServerLoad:
    """What a server says about its load.

    Attributes:
        kv_usage: used share of the fullest engine's KV cache, 0 to 1.
        running, waiting: requests being decoded, and accepted but not scheduled; over all engines.
        preemptions: requests interrupted since the server's start; over all engines.
    """

    kv_usage: float
    running: int
    waiting: int
    preemptions: int


class ConcurrencyCap:
    """The live limit of rollouts in flight.

    Args:
        limit: `max_concurrent_rollouts`.
        group: rollouts of a group, which start together.
        kv_cache_tokens: that the engines' KV caches hold together; None where the server does not tell.
        max_model_len: most tokens of a request.
    """

    def __init__(self, limit: int, group: int, kv_cache_tokens: int | None, max_model_len: int) -> None:
        self._group = group
        self._limit = max(limit, group)
        start = self._limit if kv_cache_tokens is None else kv_cache_tokens // max_model_len
        self._cap = self._within(start)
        self._finished = 0
        self._cut = False  # the last cut has not taken effect yet

    @property
    def cap(self) -> int:
        """Rollouts that may be in flight."""
        return self._cap

    def _within(self, cap: int) -> int:
        return min(max(cap, self._group), self._limit)

    def has_room(self, in_flight: int) -> bool:
        """Whether one more group may start."""
        return in_flight + self._group <= self._cap

    def finished(self, rollouts: int) -> None:
        """So many rollouts have ended."""
        self._finished += rollouts

    def observe(self, load: ServerLoad | None, in_flight: int) -> int:
        """Take in one poll of the server (None: no answer) with the rollouts in flight at that time; the new cap."""
        if load is None:
            return self._cap
        if in_flight <= self._cap:
            self._cut = False
        if load.kv_usage > SHRINK_ABOVE:
            if not self._cut:
                self._cap = self._within(int(self._cap * SHRINKAGE))
                self._finished, self._cut = 0, True
        elif load.kv_usage < GROW_BELOW and load.waiting == 0 and self._finished >= self._cap:
            self._cap = self._within(max(int(self._cap * GROWTH), self._cap + 1))
            self._finished = 0
        return self._cap
