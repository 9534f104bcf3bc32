"""From generated rollouts to samples that may be trained."""

import asyncio
import math
import time
from collections import deque
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.rollout.observe import group_observations
from slipstream.rollout.outcome import completions_table, split_group
from slipstream.rollout.prompts import Prompt
from slipstream.rollout.scoring import reward_arguments, score, total_rewards
from slipstream.rollout.sequences import assign_costs
from slipstream.rollout.setup import LoopSetup
from slipstream.rollout.types import FOREIGN, GroupResult, Rollout, RolloutGroup

MOST_FOREIGN = 8  # groups in a row, while the trainer waits for one


class Grading:
    """The scoring part of a rollout loop; the rest is `LoopMachinery`."""

    _foreign = 0
    _foreign_label = ""

    config: Any
    reward_funcs: list[Any]
    eos_token_ids: list[int]
    _reward_names: list[str]
    _executor: Executor
    _score_queue: asyncio.Queue[tuple[Prompt, RolloutGroup, list[Rollout | None]]]
    _scoring: int
    _recent_costs: deque[float]
    _setup: LoopSetup
    _trainer_waits: Any

    if TYPE_CHECKING:

        def compute_advantages(self, group: RolloutGroup) -> np.ndarray: ...
        def _hand_over(self, result: GroupResult) -> None: ...

    async def _score_groups(self) -> None:
        while True:
            prompt, group, rollouts = await self._score_queue.get()
            try:
                result = await self._score_group(prompt, group, rollouts)
            finally:
                self._scoring -= 1
            # a group that is dropped tells the size of the next as well as one that is kept
            all_sequences = [s for sequences in group.completions_sequences for s in sequences]
            result.size = result.cost or assign_costs(all_sequences)
            if result.size:
                self._recent_costs.append(result.size)
            self._hand_over(result)
            self._watch_foreign(result)

    def _watch_foreign(self, result: GroupResult) -> None:
        """Raise where the server keeps weights that are not this run's: without a sample no step would ever replace them."""
        if result.samples:
            self._foreign = 0
        elif result.dropped.get(FOREIGN) and self._trainer_waits.value:
            self._foreign += 1
        if self._foreign >= MOST_FOREIGN:
            raise RuntimeError(
                f"the server generates with weights that this run (attempt {self._setup.attempt} of {self._setup.run_id}) "
                f"did not deliver: it labels them {self._foreign_label!r}. Another run delivers to it, or it was restarted: "
                "give each run a server of its own, then resume"
            )

    async def _score(self, arguments: dict[str, Any], count: int) -> np.ndarray:
        timeout = self.config.reward_timeout
        return await score(self.reward_funcs, self._reward_names, self._executor, arguments, count, timeout)

    async def _score_group(self, prompt: Prompt, group: RolloutGroup, rollouts: list[Rollout | None]) -> GroupResult:
        begun = time.monotonic()
        alive = [i for i, rollout in enumerate(rollouts) if rollout is not None]
        by_function = np.full((len(self.reward_funcs), len(rollouts)), math.nan)
        if alive:
            arguments = reward_arguments(
                [group.prompts[i] for i in alive],
                [group.completions[i] for i in alive],
                [group.completions_ids[i] for i in alive],
                {key: [values[i] for i in alive] for key, values in group.reward_kwargs.items()},
            )
            by_function[:, alive] = await self._score(arguments, len(alive))
        group.rewards = total_rewards(by_function, group)
        advantages = np.asarray(self.compute_advantages(group), dtype=np.float64)
        if advantages.shape != group.rewards.shape:
            raise ValueError(
                f"compute_advantages returned shape {advantages.shape} for {group.rewards.shape[0]} rollouts"
            )
        if not np.isfinite(advantages[~np.isnan(group.rewards)]).all():  # one of them would spoil every weight
            raise ValueError(
                f"compute_advantages returned {advantages.tolist()} for the rewards {group.rewards.tolist()}: give each "
                f"scored rollout a finite number (prompt: {group.prompts[0]!r:.300})"
            )
        samples, dropped = split_group(group, rollouts, advantages, by_function, self._reward_names)
        observations = [
            *group_observations(group, rollouts, self.eos_token_ids),
            ("rollout/score_s", time.monotonic() - begun, 1),
            ("rollout/score_wait_s", begun - group.queued_at, 1),
        ]
        return GroupResult(
            number=prompt.number,
            epoch=prompt.epoch,
            position=prompt.position,
            row_index=group.row_index,
            samples=samples,
            dropped=dict(dropped),
            cost=assign_costs(samples) if samples else 0,
            observations=observations,
            table=completions_table(group, rollouts, advantages) if self.config.log_completions else [],
        )
