"""Run folders as a run leaves them, for tests of the run's page."""

import json
from pathlib import Path
from typing import Any

from cluster.jobs import JobRecord, record_job
from cluster.recovery import DIED, Fault
from slipstream.config_file import dump_config, parse_config
from slipstream.run_folder import RunFolder, append_jsonl, write_json
from tasks.records import record_fault

BEGAN = 1_700_000_000.0
EVIL = (
    "<b>bold</b> <img src=x onerror=\"document.title='PWNED'\"> ![i](http://evil.test/i.png) [link](http://evil.test) "
    "http://auto.test www.auto.test <script>document.title='PWNED'</script> ```\n# out\n![j](http://evil.test/j.png)\n````\n"
    "\x1b[31m\u202e | a | b |"
)
VERDICT = "generation-bound: training waits 30% of the time for rollouts; 12 samples are queued."


def new_run(root: Path, name: str = "r", **trainer: Any) -> RunFolder:
    """A run with one attempt and the two jobs of it, before its first step."""
    run = RunFolder.create(root, name)
    settings = {"model": {"name": "m"}, "data": {"source": "d"}, "trainer": {"max_steps": 10, **trainer}}
    run.run_file.write_text(dump_config(parse_config(settings)))
    run.begin_attempt(None, 0)
    for role, incarnation in (("server", "i1"), ("learner", "i2")):
        record_job(
            run, JobRecord(name, role, 1, incarnation, "slurm", f"47{incarnation}", "login", 1.0, BEGAN, "start")
        )
    write_json(run.assignment_file, {"attempt": 1, "server": "i1", "learner": "i2"})
    write_json(run.path / "origin.json", {"cwd": str(root), "time": BEGAN})
    states = {
        "i1": {"role": "server", "state": "running", "nodes": ["n1", "n2"], "reason": ""},
        "i2": {"role": "learner", "state": "pending", "nodes": [], "reason": "(Resources)"},
    }
    beat(run, "supervisor", phase="training", jobs=states)
    return run


def beat(run: RunFolder, who: str, **values: Any) -> None:
    write_json(run.heartbeat_file(who), {"attempt": 1, "counter": 1, "time": BEGAN, **values})


def learns(run: RunFolder, step: int, most: int = 10) -> None:
    """One step more: ten seconds after the one before."""
    window = {
        "step": step,
        "time": BEGAN + 10 * step,
        "reward": step / 10,
        "loss": 1 / (step + 1),
        "sample/staleness_mean": 1.5,
        "sample/staleness_max": 3,
        "perf/wall_clock_trained_tokens_per_s": 3000.0 + step,
        "rollout/generated_tokens_per_s": 4000.0,
        "verdict": VERDICT,
        "saturation": "healthy: 90% of the groups give a gradient.",
    }
    if step % 2 == 0:
        window["eval/reward"] = step / 20
    append_jsonl(run.records(1) / "metrics.jsonl", window)
    beat(run, "learner", incarnation="i2", phase="training", step=step, max_steps=most, host="n3")


def completes(run: RunFolder, step: int, text: str = EVIL, count: int = 1) -> None:
    """The policy has said something."""
    row = {
        "prompt": [{"role": "user", "content": f"What? {text}"}],
        "completion": [{"role": "assistant", "content": text}],
        "reward": 0.5,
    }
    folder = run.records(1) / "completions"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"step-{step:06d}.jsonl", "a") as file:
        file.writelines(json.dumps({**row, "advantage": 0.1}) + "\n" for _ in range(count))


def breaks(run: RunFolder, step: int, job: str, reason: str = "its process is gone", kind: str = DIED) -> None:
    """The server's job was given up after a step, one second later."""
    record_fault(run, Fault(BEGAN + 10 * step + 1, 1, "server", kind, step, ("n1",), reason, job))


def ends(run: RunFolder, kind: str, **values: Any) -> None:
    record = {"attempt": 1, "kind": kind, "reason": f"it is a {kind}", "time": BEGAN + 500, "log": "", "last_lines": ""}
    write_json(run.path / "outcome.json", {**record, "role": None, **values})
