"""How far generation may run ahead of training. Pure.

The bound is in tokens, because the number of samples in a step changes with their length. The trainer publishes a
*running total*: all tokens that it has used or dropped so far plus what may be outstanding. The worker compares the
total of what it has ever started with it, so neither side needs to know the other's state.
"""

from dataclasses import dataclass


def outstanding_bound(max_staleness: int, tokens_per_step: int) -> int:
    """Tokens that may be queued or in flight: what training uses in `max(max_staleness, 1)` steps."""
    return max(max_staleness, 1) * tokens_per_step


def full_step(ranks: int, accumulation: int, token_budget: int) -> int:
    """Tokens of a step whose every row is full: the assumption before the first step."""
    return ranks * accumulation * token_budget


@dataclass(frozen=True)
class Outstanding:
    """What the worker has under way.

    Attributes:
        finished_total: tokens of all groups ever handed to the trainer.
        in_flight: groups being generated; scoring: groups waiting for or in scoring.
        mean_group: mean tokens of the groups finished so far, None before the first.
        overtaken: of those in flight, groups that were started before one that has been generated already.
    """

    finished_total: int
    in_flight: int
    scoring: int
    mean_group: float | None
    overtaken: int = 0


def may_start(outstanding: Outstanding, allowance_total: int, trainer_waits: bool) -> bool:
    """Whether one more group may be started; none before the trainer has published an allowance.

    One group at a time until the first has finished, as nothing is known about their size. A group may always start
    when the trainer waits and nothing is under way: otherwise a bound smaller than what a step needs would be a deadlock.
    Nor may the trainer wait for stragglers alone, so groups that others have overtaken count as nothing there; what is
    started then is no more stale than the step that waits for it.
    """
    if allowance_total <= 0:
        return False
    under_way = outstanding.in_flight + outstanding.scoring
    if under_way == outstanding.overtaken and trainer_waits:
        return True
    if outstanding.mean_group is None:
        return under_way == 0
    return not is_ahead(outstanding, allowance_total)


def is_ahead(outstanding: Outstanding, allowance_total: int) -> bool:
    """Whether one more group would be more than training may lag behind: generation waits for training."""
    if allowance_total <= 0 or outstanding.mean_group is None:
        return False
    under_way = outstanding.in_flight + outstanding.scoring
    return outstanding.finished_total + (under_way + 1) * outstanding.mean_group > allowance_total
