"""Whether a scheduled start has to wait for its predecessor. Pure: facts in, a run's id out."""

from collections.abc import Sequence
from dataclasses import dataclass

SILENT_CLAIM_S = (
    900.0  # most that a start of another host, whose process cannot be looked at, may take until its folder
)


@dataclass(frozen=True)
class Seen:
    """A run (or a sweep) in the storage root: id of the deployment that it was started from, and whether it has ended."""

    run_id: str
    deployment: str
    ended: bool


@dataclass(frozen=True)
class Claim:
    """The newest start that was decided on.

    Attributes:
        alive: whether the process that decided still runs; None where that is another host's.
        age_s: seconds since it was written, by the storage's clock; None where nobody asked.
    """

    run_id: str
    alive: bool | None
    age_s: float | None = None


def has_ended(outcome_attempt: int | None, newest_attempt: int) -> bool:
    """Whether an outcome of `outcome_attempt` (None: there is none) is that of the newest attempt."""
    return outcome_attempt is not None and outcome_attempt >= newest_attempt


def predecessor(seen: Sequence[Seen], claim: Claim | None, deployment: str, own_run_id: str) -> str | None:
    """Id of the run that still works, or is about to; None where `own_run_id` may start."""
    known = {run.run_id: run for run in seen}
    if own_run_id in known:
        return None  # it has begun before: this is no start
    working = [run.run_id for run in seen if run.deployment == deployment and not run.ended]
    if working:
        return min(working)
    if claim is None or claim.run_id == own_run_id:
        return None
    if claim.run_id in known:
        return None if known[claim.run_id].ended else claim.run_id
    if claim.alive is None:
        return claim.run_id if claim.age_s is None or claim.age_s < SILENT_CLAIM_S else None
    return claim.run_id if claim.alive else None
