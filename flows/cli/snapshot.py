"""What the displays show of a run, read from its folder alone."""

import time
from dataclasses import dataclass, field
from typing import Any

from slipstream.metrics.report import reward_functions
from slipstream.run_folder import RunFolder, is_number, read_object
from tasks.observe import counting_heartbeat, endpoint, heartbeat

REWARD = "reward"
HELD_OUT = "eval/reward"
OF_ONE, HELD_OUT_OF_ONE = "rewards/{}/mean", "eval/rewards/{}"  # of one reward function


@dataclass(frozen=True)
class Snapshot:
    """A run as it stands now. `metrics` holds the newest value of each metric; histories are (step, value)."""

    run_id: str
    attempt: int = 0
    phase: str = "preparing"
    server: str = ""
    learner: str = ""
    step: int = 0
    max_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)  # rewards by name, where there are several
    windows: list[dict[str, Any]] = field(default_factory=list)
    words: dict[str, str] = field(default_factory=dict)  # the newest of each text


def take_snapshot(run: RunFolder) -> Snapshot:
    """Read the run's heartbeats and records; a run that is only being prepared gives an empty snapshot."""
    attempts = run.attempts()
    if not attempts:
        return Snapshot(run.run_id)
    attempt = attempts[-1]
    windows = list(run.merged_records("metrics.jsonl"))  # before the beats, which say how many steps there will be
    server = counting_heartbeat(run, "server-0")
    learner = counting_heartbeat(run, "learner")
    supervisor = heartbeat(run, "supervisor")
    metrics: dict[str, float] = {}
    words: dict[str, str] = {}
    for window in windows:
        metrics |= {key: value for key, value in window.items() if is_number(value) and key != "attempt"}
        words |= {key: value for key, value in window.items() if isinstance(value, str)}
    return Snapshot(
        run_id=run.run_id,
        attempt=attempt,
        phase=str(supervisor.get("phase", "starting")),
        server="ready" if endpoint(run) else str(server.get("phase", "starting")),
        learner=str(learner.get("phase", "starting")),
        step=int(learner.get("step") or metrics.get("step", 0)),
        max_steps=max(0, int(learner.get("max_steps") or 0)),
        metrics=metrics,
        rewards=history(windows, REWARD),
        held_out=history(windows, HELD_OUT),
        functions=reward_functions(windows),
        windows=windows,
        words=words,
    )


def history(windows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric, in the order of the records."""
    return [(int(w.get("step") or 0), float(w[name])) for w in windows if is_number(w.get(name))]


def held_out_before_after(run: RunFolder, name: str = HELD_OUT) -> tuple[float | None, float | None]:
    """The first and the last held-out reward of the run (or another metric); None where it was not measured."""
    values = history(list(run.merged_records("metrics.jsonl")), name)
    before = values[0][1] if values else None
    after = values[-1][1] if len(values) > 1 else None
    return before, after


def wall_time_s(run: RunFolder) -> float | None:
    """Seconds from the start of the run to its end (or to now); both were written by the flow's host."""
    started = read_object(run.path / "origin.json", "time").get("time")
    ended = read_object(run.path / "outcome.json", "time").get("time", time.time())
    return float(ended) - float(started) if started else None
