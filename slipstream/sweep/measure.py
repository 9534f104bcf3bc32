"""What the records of one run say about it as a cell: its curve on a clock without pauses, throughput, staleness. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.run_folder import is_number

STEP_S, TOKENS = "perf/step_s", "batch/trained_tokens_per_step"
RATE, STALENESS, SAMPLES = "perf/wall_clock_trained_tokens_per_s", "sample/staleness_mean", "batch/samples_per_step"
LAST = 5  # windows that the final value of a noisy metric is the mean of


@dataclass(frozen=True)
class Point:
    """One value of a metric: after so many optimizer steps, and so many seconds of training."""

    step: int
    seconds: float
    value: float


@dataclass(frozen=True)
class Measured:
    """What was measured of one run.

    Attributes:
        steps: optimizer steps that count.
        seconds: of training, from the start of the first step. Left out: the start-up of server and learner, the time
            between attempts, and steps that a later attempt has made void.
        tokens_per_s: trained tokens by step time (waiting for rollouts and weight deliveries included), over the run.
        staleness: mean over the trained samples of the updates between the oldest trained token and the step.
        curves: values of the metrics that were asked for.
    """

    steps: int = 0
    seconds: float | None = None
    tokens_per_s: float | None = None
    staleness: float | None = None
    curves: Mapping[str, Sequence[Point]] = field(default_factory=dict)

    def final(self, metric: str) -> float | None:
        """The last value; of what is measured at every step the mean of the last five."""
        points = self.curves.get(metric, ())
        if not points:
            return None
        last = points[-1:] if metric.startswith("eval/") else points[-LAST:]
        return sum(point.value for point in last) / len(last)

    def best(self, metric: str) -> float | None:
        return max((point.value for point in self.curves.get(metric, ())), default=None)

    def time_to(self, metric: str, target: float) -> float | None:
        """Seconds of training until a value first was at least `target`; None where none was."""
        return next((point.seconds for point in self.curves.get(metric, ()) if point.value >= target), None)


def measure(windows: Iterable[Mapping[str, Any]], metrics: Sequence[str]) -> Measured:
    """Measure a run from the lines of its metrics.jsonl, merged over attempts (`RunFolder.merged_records`)."""
    clock = _Clock()
    curves: dict[str, list[Point]] = {metric: [] for metric in metrics}
    tokens = _Ratio()
    rate = _Ratio()
    staleness = _Ratio()
    for window in windows:
        step = int(window["step"]) if is_number(window.get("step")) else clock.step
        new = max(0, step - clock.step)
        seconds = clock.at(window, step, new)
        for metric, points in curves.items():
            if is_number(value := window.get(metric)) and seconds is not None:
                points.append(Point(step, seconds, float(value)))
        if new and is_number(per_step := window.get(TOKENS)) and is_number(step_s := window.get(STEP_S)):
            tokens.add(per_step * new, step_s * new)
        if new and is_number(value := window.get(RATE)):
            rate.add(value * new, new)
        if new and is_number(value := window.get(STALENESS)):
            samples = window.get(SAMPLES)
            weight = new * (samples if is_number(samples) else 1)
            staleness.add(value * weight, weight)
    return Measured(
        clock.step, clock.seconds, tokens.value if tokens.value is not None else rate.value, staleness.value, curves
    )  # fmt: skip


class _Ratio:
    def __init__(self) -> None:
        self._above = self._below = 0.0

    def add(self, above: float, below: float) -> None:
        self._above += above
        self._below += below

    @property
    def value(self) -> float | None:
        return self._above / self._below if self._below > 0 else None


class _Clock:
    """Seconds of training: each attempt's windows follow those of the attempt before without a gap."""

    def __init__(self) -> None:
        self.step = 0
        self.seconds: float | None = None
        self._attempt: Any = None
        self._base = self._begun = 0.0

    def at(self, window: Mapping[str, Any], step: int, new: int) -> float | None:
        moment = window.get("time")
        if is_number(moment):
            if self.seconds is None or window.get("attempt") != self._attempt:
                self._attempt = window.get("attempt")
                self._base = self.seconds or 0.0
                step_s = window.get(STEP_S)
                self._begun = moment - (step_s * new if is_number(step_s) else 0.0)
            self.seconds = max(self.seconds or 0.0, self._base + moment - self._begun)
        self.step = max(self.step, step)
        return self.seconds
