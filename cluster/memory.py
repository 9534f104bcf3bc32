"""What the decider remembers between two looks: since when it has seen what. Pure values."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class State:
    """`since`: key -> the observer's monotonic clock; `seen`: key -> the value that was seen last."""

    since: dict[str, float] = field(default_factory=dict)
    seen: dict[str, object] = field(default_factory=dict)

    def first(self, key: str, now: float, condition: bool) -> "State":
        """Remember `now` at the first time that `condition` holds; forget it when it does not."""
        if condition == (key in self.since):
            return self
        since = {k: v for k, v in self.since.items() if k != key}
        return replace(self, since={**since, key: now} if condition else since)

    def changed(self, key: str, now: float, value: object) -> "State":
        """Remember `now` whenever `value` differs from what was seen before."""
        if key in self.seen and self.seen[key] == value:
            return self
        return replace(self, since={**self.since, key: now}, seen={**self.seen, key: value})

    def forget(self, *keys: str) -> "State":
        return State(
            {k: v for k, v in self.since.items() if k not in keys},
            {k: v for k, v in self.seen.items() if k not in keys},
        )

    def restart(self, now: float, *keys: str) -> "State":
        """Count what is remembered of `keys` from `now` on."""
        return replace(self, since={k: now if k in keys else v for k, v in self.since.items()})

    def owned(self, role: str, incarnation: str | None) -> "State":
        """Forget what was seen of another job of `role` than `incarnation` (None: it has none)."""
        key = f"{role} is"
        if key in self.seen and self.seen[key] == incarnation:
            return self
        mine = [k for k in self.since if k.startswith((f"{role} ", f"{role}-"))]
        if role != "server":
            mine += ["learner may load", "training", "phase"]
        state = self.forget(*mine)
        return replace(state, seen={**state.seen, key: incarnation})

    def age(self, key: str, now: float) -> float:
        """Seconds since `key` was remembered; 0 if it is not."""
        return now - self.since.get(key, now)
