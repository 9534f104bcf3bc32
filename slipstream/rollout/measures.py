"""What a rollout loop measures between two of its reports. No clock, no I/O."""

from slipstream.rollout.concurrency import ServerLoad
from slipstream.rollout.types import Observation

NO_WAIT = 1e-9  # weight of "no wait": it counts only in a window without any


class Measures:
    """Counts and times since the last report.

    Attributes:
        begun: when the time of the next report began, in seconds.
        generated_tokens, retries: counts.
        durations: of rollouts, in seconds.
        waits: of generation for the staleness bound, in seconds; held_s: their sum, that of a wait that goes on included.
    """

    def __init__(self, now: float) -> None:
        self.begin(now)

    def begin(self, now: float) -> None:
        self.begun = now
        self.generated_tokens = self.retries = 0
        self.held_s = 0.0
        self.waits: list[float] = []
        self.durations: list[float] = []

    def report(self, now: float, in_flight: int, cap: int, score_queue: int) -> list[Observation]:
        """The observations, at the end of which counting starts anew."""
        seconds = max(now - self.begun, 1e-9)
        found: list[Observation] = [
            ("rollout/generated_tokens_per_s", self.generated_tokens / seconds, seconds),
            ("rollout/concurrency", in_flight, 1),
            ("rollout/concurrency_cap", cap, 1),
            ("rollout/score_queue_size", score_queue, 1),
            ("rollout/vllm_retry_count", self.retries, 1),
        ]
        if self.durations:
            mean = sum(self.durations) / len(self.durations)
            found.append(("rollout/duration_s", mean, len(self.durations)))
        found.append(("rollout/backpressure_s", 0.0, NO_WAIT))
        found += [("rollout/backpressure_s", wait, 1) for wait in self.waits]
        found.append(("rollout/backpressure_frac", min(self.held_s / seconds, 1.0), seconds))
        self.begin(now)
        return found


class LoadWatch:
    """Turns what the server counts from its start into what is new."""

    def __init__(self) -> None:
        self._preemptions: int | None = None

    def observations(self, load: ServerLoad) -> list[Observation]:
        before = load.preemptions if self._preemptions is None else self._preemptions
        # fewer than before: the server was started again, and counts from zero
        new = load.preemptions - before if load.preemptions >= before else load.preemptions
        self._preemptions = load.preemptions
        return [
            ("rollout/vllm_kv_cache_usage_frac", load.kv_usage, 1),
            ("rollout/vllm_running_requests", load.running, 1),
            ("rollout/vllm_queued_requests", load.waiting, 1),
            ("rollout/vllm_preemption_count", new, 1),
        ]
