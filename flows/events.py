"""Events of a run, tied to its flow run: what happened, and which of it is still to be told.

Whoever tells an event twice (two processes of one run, or one that was killed before it could remember) sends the same id,
of which Prefect's server keeps one. Nothing here talks to a server; `flows.page.api` does.
"""

import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cluster.decide import Kind
from flows.cli.progress import phase_text
from flows.names import TAG
from flows.page.facts import Facts, Recovery

STARTED, HEARTBEAT, RECOVERED = f"{TAG}.started", f"{TAG}.heartbeat", f"{TAG}.recovered"
FINISHED, FAILED, CANCELLED = f"{TAG}.finished", f"{TAG}.failed", f"{TAG}.cancelled"
SWEEP_FINISHED = f"{TAG}.sweep.finished"
ENDINGS = {Kind.FINISH: FINISHED, Kind.FAIL: FAILED, Kind.CANCELLED: CANCELLED}

HEARTBEAT_S = 60
NAMESPACE = uuid.UUID("5f0c3f1e-8c5c-4e0e-9a39-3c1f6f5f7f0a")


@dataclass(frozen=True)
class FlowRun:
    """The flow run that events and artifacts belong to."""

    id: str
    name: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Due:
    """An event that is to be told. `key`: what is remembered, so that it is told once; "" is not remembered."""

    key: str
    name: str
    occurred: float
    payload: Mapping[str, Any]
    id: uuid.UUID


def due(facts: Facts, flow_run: FlowRun, told: Collection[str], now: float) -> list[Due]:
    """What has happened to the run and was not told, oldest first.

    Args:
        told: keys of events that were told before, by whichever process.
        now: seconds since the epoch.
    """
    found: list[Due] = []

    def add(key: str, name: str, occurred: float, payload: Mapping[str, Any]) -> None:
        if key not in told:
            found.append(Due(key, name, occurred, payload, event_id(facts, flow_run, key)))

    add(f"started {flow_run.id}", STARTED, now, _now(facts))
    for one in facts.recoveries:
        if one.counts and one.seconds is not None:
            add(f"recovered {one.key}", RECOVERED, one.time + one.seconds, _recovered(facts, one))
    if facts.outcome is not None:
        name = ENDINGS[facts.outcome.kind]
        payload = {**_now(facts), "reason": facts.mask(facts.outcome.reason), "role": facts.outcome.role}
        add(f"{name} {facts.outcome_time:.3f}", name, facts.outcome_time or now, payload)
    return found


def heartbeat(facts: Facts, flow_run: FlowRun, now: float) -> Due:
    """The event of this minute, the same one for all processes of the run."""
    minute = int(now // HEARTBEAT_S)
    return Due("", HEARTBEAT, now, _now(facts), event_id(facts, flow_run, f"heartbeat {minute}"))


def event_id(facts: Facts, flow_run: FlowRun, key: str) -> uuid.UUID:
    return uuid.uuid5(NAMESPACE, f"{facts.run_id}\n{flow_run.id}\n{key}")


def _now(facts: Facts) -> dict[str, Any]:
    snapshot = facts.snapshot
    return {
        "step": snapshot.step,
        "max_steps": snapshot.max_steps or None,
        "reward": snapshot.rewards[-1][1] if snapshot.rewards else None,
        "held_out_reward": snapshot.held_out[-1][1] if snapshot.held_out else None,
        "trained_tokens_per_s": snapshot.metrics.get("perf/wall_clock_trained_tokens_per_s"),
        "phase": facts.mask(phase_text(snapshot)),
        "attempt": snapshot.attempt,
        "folder": facts.folder,
    }


def _recovered(facts: Facts, one: Recovery) -> dict[str, Any]:
    return {
        "role": one.role,
        "kind": one.kind,
        "reason": facts.mask(one.reason),
        "step": one.step_after,
        "lost_step": one.step,
        "seconds": one.seconds,
        "folder": facts.folder,
    }


def run_resource(run_id: str) -> str:
    return f"{TAG}.run.{run_id}"


def sweep_resource(sweep_id: str) -> str:
    return f"{TAG}.sweep.{sweep_id}"


def as_json(event: Due, resource: str, name: str, flow_run: FlowRun, tags: Iterable[str]) -> dict[str, Any]:
    """What POST /events takes.

    Args:
        resource: id of what it happened to; `name`: of the same, for people.
        tags: by which automations find it, beside the flow run's own.
    """
    parent = {
        "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
        "prefect.resource.role": "flow-run",
        "prefect.resource.name": flow_run.name or name,
    }
    labels = [
        {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
        for tag in sorted({*tags, *flow_run.tags})
    ]
    return {
        "id": str(event.id),
        "event": event.name,
        "occurred": datetime.fromtimestamp(event.occurred, UTC).isoformat(),
        "resource": {"prefect.resource.id": resource, "prefect.resource.name": name},
        "related": [parent, *labels],
        "payload": {key: value for key, value in event.payload.items() if value is not None},
    }


def sweep_finished(sweep_id: str, payload: Mapping[str, Any], when: float) -> Due:
    """The event of a sweep's end at `when` (seconds since the epoch); its resource is `sweep_resource(sweep_id)`."""
    own = uuid.uuid5(NAMESPACE, f"{sweep_id}\n{SWEEP_FINISHED}\n{when:.3f}")
    return Due("", SWEEP_FINISHED, when, payload, own)
