"""What is printed at the end of a run, and by `slipstream status`."""

import shlex
from collections.abc import Sequence

from flows.cli.parts import fault_lines, parts_lines
from flows.cli.progress import clock, phase_text
from flows.cli.snapshot import HELD_OUT_OF_ONE, held_out_before_after, take_snapshot, wall_time_s
from slipstream.run_folder import RunFolder, read_object
from tasks.outcome import read_outcome
from tasks.records import assigned_jobs
from tasks.stored import backend_anyway


def _reward(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def summary(run: RunFolder, again: Sequence[str]) -> str:
    """The end of a finished run: results, where things lie, and the command that repeats it with other settings."""
    snapshot = take_snapshot(run)
    result = read_object(run.path / "result.json")
    before, after = held_out_before_after(run)
    seconds = wall_time_s(run)
    checkpoints = run.output(snapshot.attempt)
    metrics = run.records(snapshot.attempt) / "metrics.jsonl"
    lines = [
        f"{run.run_id} has finished",
        f"  held-out reward  {_reward(before)} → {_reward(after)}",
        *(f"    {line}" for line in _held_out_of_each(run, snapshot.functions)),
        f"  steps            {result.get('steps', snapshot.step)}",
        f"  wall time        {clock(seconds) if seconds is not None else 'unknown'}",
        f"  checkpoints      {checkpoints}",
        f"  metrics          {metrics}",
        f"  report           {run.report_file}",
        "again, with other settings:",
        f"  {shlex.join(again)}",
    ]
    return "\n".join(lines)


def _held_out_of_each(run: RunFolder, functions: Sequence[str]) -> list[str]:
    """The held-out reward of each function, before and after, where it was measured."""
    found = [(name, *held_out_before_after(run, HELD_OUT_OF_ONE.format(name))) for name in functions]
    return [f"{name}  {_reward(before)} → {_reward(after)}" for name, before, after in found if before is not None]


def status(run: RunFolder) -> str:
    """A run's state now: outcome or phase, jobs, step and newest metrics."""
    snapshot = take_snapshot(run)
    outcome = read_outcome(run)
    ended = outcome is not None and read_object(run.path / "outcome.json").get("attempt") == snapshot.attempt
    state = f"{outcome.kind}: {outcome.reason}" if outcome and ended else phase_text(snapshot)
    step = f"{snapshot.step}" + (f" of {snapshot.max_steps}" if snapshot.max_steps else "")
    lines = [str(run.path), f"  state     {state}", f"  attempt   {snapshot.attempt}", f"  step      {step}"]
    jobs, _ = assigned_jobs(run)
    views = backend_anyway(run).look(run, list(jobs.values()))
    for role, job in jobs.items():
        view = views[job.incarnation]
        reason = view.queue_reason or view.reason
        where = f" on {', '.join(view.nodes)}" if view.nodes else ""
        lines.append(f"  {role:<9} {view.state}{where} (job {job.job_id}){' – ' + reason if reason else ''}")
    before, after = held_out_before_after(run)
    if snapshot.rewards:
        lines.append(f"  reward    {snapshot.rewards[-1][1]:.3f}")
    if before is not None:
        lines.append(f"  held-out  {_reward(before)}" + (f" → {_reward(after)}" if after is not None else ""))
    if beats := parts_lines(run):
        lines += ["  parts", *(f"  {line}" for line in beats)]
    if faults := fault_lines(run):
        lines += ["  started again", *(f"  {line}" for line in faults)]
    return "\n".join(lines)
