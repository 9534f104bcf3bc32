"""Says in words what the metrics of each window mean, and logs it where it has changed."""

import logging
from collections import deque

from slipstream.metrics.verdict import HEALTHY, Limits, diagnose, saturation, verdict

logger = logging.getLogger(__name__)

HISTORY = 60  # windows that a trend is looked for in: long enough for a slow collapse, short enough to forget a warm-up

# measured on rank 0 alone, so that it may speak of them without the other ranks
_RANK_0 = ("rollout/", "completions/", "reward", "frac_reward_zero_std", "sample/", "batch/dropped_", "tools/", "env/")


def known_without_a_step(name: str) -> bool:
    """Whether a metric tells something while no step is taken, and is whole on rank 0."""
    return name.startswith(_RANK_0)


class Narrator:
    """Keeps the history of windows; one per run, on rank 0."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._history: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self._said: dict[str, str] = {}
        self._rollouts: dict[str, float] = {}

    def window(self, values: dict[str, float], waited_s: float | None = None) -> dict[str, str]:
        """Take in a window; `verdict` and `saturation` in words, as far as it tells them.

        `waited_s`: for a window without a step, how long training has waited by now.
        """
        self._history.append(dict(values))
        # the rollout process reports every other second: in a shorter window what it said last still holds
        self._rollouts |= {name: value for name, value in values.items() if name.startswith("rollout/")}
        shown = {**self._rollouts, **values}
        if waited_s is not None:
            shown |= {"perf/rollout_wait_s": waited_s, "perf/step_s": waited_s}
        found = verdict(shown, self._limits)
        texts: dict[str, str] = {}
        if found is not None:
            texts["verdict"] = str(found)
            self._say("verdict", found.kind, str(found), found.kind != "balanced")
        state = saturation(self._history)
        if state is not None:
            texts["saturation"] = diagnose(self._history, self._limits.num_generations)
            self._say("saturation", state.kind, texts["saturation"], state.kind != HEALTHY)
        return texts

    def diagnosis(self, values: dict[str, float]) -> str:
        """What the rewards say, with the window that is not closed yet; empty where no group was scored."""
        return diagnose([*self._history, values], self._limits.num_generations)

    def _say(self, topic: str, kind: str, text: str, matters: bool) -> None:
        if self._said.get(topic) != kind:
            self._said[topic] = kind
            logger.log(logging.WARNING if matters else logging.INFO, "%s", text)
