"""What the rollout loop does where a hook, a reward or the server's weights are not as they must be."""

import asyncio

import numpy as np
import pytest

from slipstream.rollout import machinery
from slipstream.rollout.loop import AsyncRolloutLoop
from slipstream.rollout.scoring import RewardError
from slipstream.rollout.types import EndOfData
from tests.loop_harness import (
    LABEL,
    Harness,
    Lifecycle,
    all_results,
    counting,
    fails,
    length_reward,
    rows,
    text_of,
)


def boom(**kwargs):
    raise ValueError("no such column")


def boom_on_last(gold, completion_ids, **kwargs):
    if gold[0] == "B":
        raise ValueError("no such column")
    return length_reward(completion_ids)


def test_a_failing_reward_stops_the_run_by_its_name_and_the_data_does_not_end(monkeypatch):
    """However often the loop looks whether all is handed over, between the failure and its end."""
    monkeypatch.setattr(machinery, "POLL_S", 0)
    harness = Harness(rows("a", "b"), rewards=[boom_on_last])
    fails(harness, RewardError, "reward boom_on_last raised ValueError: no such column")
    assert not any(isinstance(m, EndOfData) for m in harness.buffer.queue)


class WrongShape(AsyncRolloutLoop):
    def compute_advantages(self, group):
        return np.zeros(2)


def test_advantages_of_a_wrong_shape_stop_the_run():
    fails(Harness(rows("a"), loop_cls=WrongShape), ValueError, r"shape \(2,\) for 3 rollouts")


class NotFinite(AsyncRolloutLoop):
    def compute_advantages(self, group):
        return group.rewards / 0.0


def test_advantages_that_are_not_finite_stop_the_run():
    fails(
        Harness(rows("a"), loop_cls=NotFinite), ValueError, "compute_advantages returned .*inf.* for the rewards .*2.0"
    )


def test_weights_of_somebody_else_on_the_server_end_the_run_with_their_label():
    harness = Harness(rows(*"abcdefghij"), lambda body, index: counting(body, index, "other-run/a1/7"))
    fails(harness, RuntimeError, "attempt 1 of run.* labels them 'other-run/a1/7'. Another run delivers to it")


def test_some_groups_of_foreign_weights_are_only_dropped():
    def script(body, index):
        return counting(body, index, LABEL if text_of(body) in "dh" else "other-run/a1/7")

    found = all_results(Harness(rows(*"abcdefghij"), script))
    assert [number for number, result in sorted(found.items()) if result.samples] == [3, 7]


class CancelsItself(AsyncRolloutLoop):
    def compute_advantages(self, group):
        raise asyncio.CancelledError


def test_a_hook_that_raises_cancelled_error_stops_the_run_instead_of_its_task():
    fails(Harness(rows("a"), loop_cls=CancelsItself), RuntimeError, "raised asyncio.CancelledError")


class OwnAdvantages(AsyncRolloutLoop):
    def compute_advantages(self, group):
        assert group.group_id == 0
        assert group.rewards.tolist() == [2, 3, 4]
        return group.rewards * 10


def test_advantages_of_one_s_own_reach_the_samples():
    result = all_results(Harness(rows("a"), loop_cls=OwnAdvantages))[0]
    assert [s.advantage for s in result.samples] == [20, 30, 40]


@pytest.mark.parametrize("failing", [False, True])
def test_set_up_and_closed_also_after_a_failure(failing):
    Lifecycle.events.clear()
    harness = Harness(
        rows("a"), loop_cls=Lifecycle, rewards=[boom if failing else length_reward], setup={"loop_state": {"x": 1}}
    )
    if failing:
        fails(harness, RewardError, "boom")
    else:
        all_results(harness)
    assert Lifecycle.events == ["setup", {"x": 1}, "close"]
