"""What stands in the artifacts of a run's page. Pure: facts in, artifacts out.

Whatever others wrote (models, logs, schedulers) stands in code spans and code blocks, and is masked first. What does not
change the content must not be in it: an artifact is sent again only where its content is new.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.decide import Kind
from flows.cli.progress import COLUMNS, clock, phase_text, sparkline
from flows.cli.snapshot import HELD_OUT_OF_ONE, OF_ONE, history
from flows.page.curves import Curves
from flows.page.facts import Facts, Recovery, moment
from flows.page.text import block, code, table
from slipstream.run_folder import is_number

RUN, CURVES, PROGRESS = "slipstream-run", "slipstream-curves", "slipstream-progress"
JOBS, RECOVERIES, COMPLETIONS = "slipstream-jobs", "slipstream-recoveries", "slipstream-completions"
KEYS = (RUN, PROGRESS, JOBS, RECOVERIES, COMPLETIONS, CURVES)  # in the order that they are sent in

LAST_RECOVERIES = 50
SAMPLE_CHARACTERS = 1500
ENDINGS = {Kind.FINISH: "finished", Kind.FAIL: "failed", Kind.CANCELLED: "stopped"}


@dataclass(frozen=True)
class Content:
    """One artifact. `description` is what its card on the page shows, `data` what it shows when it is opened."""

    type: str
    data: Any
    description: str


def contents(facts: Facts, curves: Curves) -> dict[str, Content]:
    """The artifacts of a run by key, in the order of `KEYS`; those that have nothing to say yet are left out."""
    found = {RUN: Content("markdown", _overview(facts), headline(facts))}
    if facts.share is not None:
        found[PROGRESS] = Content("progress", round(100 * facts.share, 1), _progress(facts))
    if facts.jobs:
        found[JOBS] = Content("markdown", _jobs(facts), _jobs_in_short(facts))
    if facts.recoveries:
        found[RECOVERIES] = Content("markdown", _recoveries(facts), _recoveries_in_short(facts))
    if facts.samples:
        found[COMPLETIONS] = Content("markdown", _completions(facts), f"The newest, of step {facts.samples[-1].step}")
    if facts.snapshot.windows:
        found[CURVES] = Content("markdown", curves.others or "No other curves yet.", curves.first)
    return found


def state(facts: Facts) -> str:
    """The state of a run in words, of others in part."""
    if facts.outcome is not None:
        return ENDINGS.get(facts.outcome.kind, str(facts.outcome.kind))
    return facts.mask(phase_text(facts.snapshot))


def steps(facts: Facts) -> str:
    step, most = facts.snapshot.step, facts.snapshot.max_steps
    share = f" ({facts.share:.0%})" if facts.share is not None else ""
    return f"{step}" + (f" of {most}" if most else "") + share


def headline(facts: Facts) -> str:
    """The run in a few lines: a card cuts off what does not fit into one."""
    state_line = f"**{ENDINGS[facts.outcome.kind]}**" if facts.outcome is not None else code(state(facts), 200)
    lines = [state_line, f"step {steps(facts)}"]
    if facts.snapshot.rewards:
        lines.append(f"reward {facts.snapshot.rewards[-1][1]:.3f}")
    if before_after := _before_after(facts.snapshot.held_out):
        lines.append(f"held out {before_after}")
    if facts.outcome is None and (kind := facts.snapshot.words.get("verdict", "").partition(":")[0]):
        lines.append(code(facts.mask(kind), 60))
    if facts.outcome is not None and facts.outcome.kind is not Kind.FINISH:
        lines.append(code(facts.mask(facts.outcome.reason), 300))
    return "\n\n".join(lines)


def _before_after(values: list[tuple[int, float]]) -> str:
    ends = [value for _, value in (values[:1] if len(values) < 2 else (values[0], values[-1]))]
    return " → ".join(f"{value:.3f}" for value in ends)


def _progress(facts: Facts) -> str:
    left = f" · about {clock(facts.left_s)} left" if facts.left_s is not None else ""
    return f"step {steps(facts)}{left}"


def _overview(facts: Facts) -> str:
    parts = [table(["of the run", "now"], _rows(facts))]
    words = facts.snapshot.words
    said = [
        (title, words[name]) for title, name in (("Bottleneck", "verdict"), ("Rewards", "saturation")) if name in words
    ]
    parts += [f"**{title}**\n\n{block(facts.mask(text))}" for title, text in said]
    if facts.outcome is not None:
        parts += _ending(facts)
    return "\n\n".join(parts)


def _rows(facts: Facts) -> list[list[str]]:
    snapshot = facts.snapshot
    rows = [["run", code(facts.run_id)], ["folder", code(facts.folder)], ["state", code(state(facts))]]
    rows += [[name, code(facts.mask(value))] for name, value in _sources(facts.settings)]
    rows += [["attempt", str(snapshot.attempt or "–")], ["step", steps(facts)]]
    if facts.left_s is not None:
        rows.append(["time left", f"about {clock(facts.left_s)}"])
    rewards = [value for _, value in snapshot.rewards]
    if rewards:
        rows.append(["reward", f"{rewards[-1]:.3f} {sparkline(rewards, 30)}"])
    if text := _before_after(snapshot.held_out):
        rows.append(["held-out reward", text])
    for name in snapshot.functions:
        values = history(snapshot.windows, OF_ONE.format(name))
        held_out = _before_after(history(snapshot.windows, HELD_OUT_OF_ONE.format(name)))
        newest = f"{values[-1][1]:.3f}" if values else "–"
        rows.append([f"reward {code(name, 60)}", newest + (f", held out {held_out}" if held_out else "")])
    for label, name, form in COLUMNS:
        if is_number(snapshot.metrics.get(name)):
            rows.append([label, form.format(snapshot.metrics[name])])
    if is_number(stalest := snapshot.metrics.get("sample/staleness_max")):
        rows.append(["largest staleness", f"{stalest:.0f}"])
    times_again = {0: "never", 1: "once"}.get(len(facts.recoveries), f"{len(facts.recoveries)} times")
    rows.append(["started again", times_again])
    if not facts.samples_wanted:
        rows.append(["completions", f"not recorded: set {code('trainer.log_completions')}"])
    if times := [window["time"] for window in snapshot.windows if is_number(window.get("time"))]:
        rows.append(["newest record", moment(max(times))])
    return rows


def _sources(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Model and data."""
    found = []
    for section, key in (("model", "name"), ("data", "source")):
        part = settings.get(section)
        if isinstance(part, dict) and part.get(key):
            found.append((section, str(part[key])))
    return found


def _ending(facts: Facts) -> list[str]:
    assert facts.outcome is not None
    outcome = facts.outcome
    at = f" at {moment(facts.outcome_time)}" if facts.outcome_time else ""
    parts = [f"## {ENDINGS[outcome.kind].capitalize()}{at}"]
    if outcome.role:
        parts.append(f"The part that failed: {code(outcome.role, 60)}")
    parts.append(block(facts.mask(outcome.reason)))
    if outcome.last_lines:
        parts.append(f"Last lines of {code(facts.mask(outcome.log))}")
        parts.append(block(facts.mask(outcome.last_lines)[-6000:], 6000))
    if outcome.kind is not Kind.FINISH:
        parts.append(f"Continue once the cause is mended: {code(f'slipstream resume {facts.folder}')}")
    parts.append(f"Report: {code(f'{facts.folder}/report.html')}")
    return parts


def _jobs(facts: Facts) -> str:
    rows = [
        [
            code(job.role, 60),
            code(job.job_id),
            code(job.state),
            code(job.where),
            code(facts.mask(job.reason)),
            code(job.log),
        ]
        for job in facts.jobs
    ]
    return table(["part", "job", "state", "where", "reason", "log"], rows)


def _jobs_in_short(facts: Facts) -> str:
    def said(reason: str) -> str:
        return f" ({code(facts.mask(reason), 80)})" if reason else ""

    return "\n\n".join(f"{code(job.role, 60)} {code(job.state, 60)}{said(job.reason)}" for job in facts.jobs)


def _recoveries(facts: Facts) -> str:
    rows = [
        [
            moment(one.time),
            code(one.role, 60),
            code(one.kind, 60),
            code(facts.mask(one.reason)),
            f"{one.step} (attempt {one.attempt})",
            _next_step(one),
        ]
        for one in reversed(facts.recoveries[-LAST_RECOVERIES:])
    ]
    text = table(["when", "what", "kind", "why", "at step", "until the next step"], rows)
    more = len(facts.recoveries) - len(rows)
    return f"{text}\n\n{more} earlier ones are in the run's records." if more > 0 else text


def _next_step(one: Recovery) -> str:
    return f"{clock(one.seconds)} (step {one.step_after})" if one.seconds is not None else "not there yet"


def _recoveries_in_short(facts: Facts) -> str:
    last = facts.recoveries[-1]
    return f"{len(facts.recoveries)} · the last: {code(last.role, 60)} at step {last.step}, {code(facts.mask(last.reason), 200)}"


def _completions(facts: Facts) -> str:
    parts: list[str] = []
    above = None
    for sample in reversed(facts.samples):
        if sample.prompt != above:
            parts += ["**Prompt**", block(facts.mask(sample.prompt), SAMPLE_CHARACTERS)]
        above = sample.prompt
        reward = "not scored" if sample.reward is None else f"reward {sample.reward:.3f}"
        parts += [
            f"**Completion** · {reward} · step {sample.step}",
            block(facts.mask(sample.completion), SAMPLE_CHARACTERS),
        ]
    return "\n\n".join(parts)
