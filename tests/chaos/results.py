"""What came of each seed: one line of JSON, appended; a table over all of them."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from slipstream.run_folder import append_jsonl, read_jsonl


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        end: how the run ended, or "" where it did not within its time.
        met: which faults were met; the run may be over before a second one.
        problems: what is not as it must be; none: the run is right.
        ended_after_s: seconds from a person's cancel to the last process of a job; None where nobody cancelled.
        load: processes that waited for each core while it ended, at least 1: the seconds above are judged by it.
        recovery_s: by fault, seconds from the fault to the first step that the run had not done before.
    """

    seed: int
    faults: str
    shape: str
    expected: str
    end: str
    met: list[str]
    problems: list[str]
    attempts: int = 0
    redone: int = 0
    seconds: float = 0.0
    ended_after_s: float | None = None
    load: float = 1.0
    recovery_s: dict[str, float] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return not self.problems


def done(path: Path) -> dict[int, Result]:
    """The results so far, by seed; of several the newest."""
    return {line["seed"]: Result(**line) for line in read_jsonl(path)}


def append(path: Path, result: Result) -> None:
    append_jsonl(path, asdict(result))


def table(results: list[Result]) -> str:
    """Runs, wrong ones and recovery times per fault."""
    runs: dict[str, int] = defaultdict(int)
    wrong: dict[str, list[int]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name in result.faults.split(" + "):
            runs[name] += 1
            if not result.right:
                wrong[name].append(result.seed)
        if len(result.recovery_s) == 1:  # of two faults at once nobody can tell whose time it is
            for name, seconds in result.recovery_s.items():
                times[name].append(seconds)
    width = max([len(name) for name in runs] + [5])
    lines = [f"{'fault':<{width}}  runs  wrong  recovery s: median  longest"]
    for name in sorted(runs):
        found = times[name]
        took = f"{median(found):18.1f}  {max(found):7.1f}" if found else ""
        lines.append(f"{name:<{width}}  {runs[name]:>4}  {len(wrong[name]):>5}  {took}".rstrip())
    bad = [result for result in results if not result.right]
    lines.append(f"{len(results)} runs, {len(results) - len(bad)} right")
    lines += [f"  seed {result.seed} ({result.faults}): {'; '.join(result.problems)}" for result in bad]
    return "\n".join(lines)


def to_json(result: Result) -> str:
    return json.dumps(asdict(result))
