"""`AsyncRolloutLoop`: the hooks of the rollout process, with GRPO as their default.

To change a step, subclass it, override the step's method and set the subclass as `loop_cls` of the trainer.
"""

import asyncio
import contextvars
import math
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.algorithm.advantages import group_advantages
from slipstream.rollout import types as t
from slipstream.rollout.client import Choice, ServerUnavailable
from slipstream.rollout.machinery import LoopMachinery
from slipstream.rollout.observe import terminated, trained_length
from slipstream.rollout.scoring import reward_arguments
from slipstream.rollout.setup import request_seed
from slipstream.rollout.types import Message, Rollout, RolloutGroup, TurnRecord
from slipstream.serving.labels import parse_label

# (prompt number, generation, [turns so far]) of the rollout that is being generated
_current: contextvars.ContextVar[tuple[int, int, list[int]]] = contextvars.ContextVar("slipstream_rollout")


class AsyncRolloutLoop(LoopMachinery):
    """Generates and scores rollouts; implements GRPO with single-turn generation.

    Each prompt passes `filter_prompt`, `generate_one` (once per generation), the reward functions, and
    `compute_advantages` (once per group). `setup` and `close` run on the loop's event loop. A hook may read
    `self.config`, `self.tokenizer`, `self.model_version`.
    """

    # ---- hooks

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        """Whether a prompt is generated for at all. A rejected one is settled for this epoch."""
        return True

    async def generate_one(self, prompt: list[Message], tools: list[Any], group_id: int = 0) -> Rollout:
        """Generate one rollout for a prompt."""
        turn = await self.generate_one_turn(self.render(prompt))
        return self._single_turn(turn)

    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        """Sample one answer from the server with the config's settings."""
        number, generation, turns = _current.get((0, 0, []))
        seed = request_seed(self._setup.seed, number, generation, len(turns), self._setup.attempt)
        turns.append(0)
        started = self.model_version
        (choice,) = await self._client.generate(
            prompt_ids, n=1, max_tokens=self._room(prompt_ids), seed=seed, lora=self.lora_name
        )
        return self._turn(prompt_ids, choice, started)

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """One advantage per rollout, in the order of `group.rewards`."""
        assert group.rewards is not None
        return group_advantages(group.rewards)

    async def setup(self) -> None:
        """Create what the other hooks need; before the first prompt."""

    async def close(self) -> None:
        """Release what `setup` created; also after a failure."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of the loop; handed to `load_state_dict` on resume. JSON, so with text as keys."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called after `setup`, before the first prompt."""

    # ---- generation

    def _turn(self, prompt_ids: list[int], choice: Choice, started: int) -> TurnRecord:
        if self._setup.use_generate_route:
            parsed = [parse_label(label or "", self._setup.run_id, self._setup.attempt) for label in choice.labels]
            versions = [-1 if version is None else version for version in parsed]
            if None in parsed:
                self._foreign_label = choice.labels[parsed.index(None)] or ""
        else:
            versions = [started] * len(choice.token_ids)
        self._measures.generated_tokens += len(choice.token_ids)
        return TurnRecord(
            prompt_ids=prompt_ids,
            output_ids=choice.token_ids,
            output_log_probs=choice.logprobs,
            output_sampling_mask=choice.candidates,
            output_sampler_logprobs=choice.heads,
            output_versions=versions,
            finish_reason=choice.finish_reason,
        )

    def _single_turn(self, turn: TurnRecord) -> Rollout:
        text = self.tokenizer.decode(turn.output_ids, skip_special_tokens=True)
        return Rollout([{"role": "assistant", "content": text}], list(turn.output_ids), [turn])

    @property
    def _coalesces(self) -> bool:
        """One request for the whole group, where no hook and no tool needs a request of its own."""
        mine = type(self)
        return (
            mine.generate_one is AsyncRolloutLoop.generate_one
            and mine.generate_one_turn is AsyncRolloutLoop.generate_one_turn
            and not self.tools
            and self.environment_factory is None
        )

    async def _generate_group(
        self, number: int, prompt: list[Message], prompt_ids: list[int]
    ) -> list[Rollout | Exception]:
        count = self.config.num_generations
        if self._coalesces:
            started, begun = self.model_version, time.monotonic()
            seed = request_seed(self._setup.seed, number, 0, 0, self._setup.attempt)
            try:
                choices = await self._client.generate(
                    prompt_ids, n=count, max_tokens=self._room(prompt_ids), seed=seed, lora=self.lora_name
                )
                rollouts = [self._single_turn(self._turn(prompt_ids, choice, started)) for choice in choices]
            except ServerUnavailable:
                raise
            except Exception as error:
                return [error] * count
            self._measures.durations += [time.monotonic() - begun] * count
            return list(rollouts)

        async def one(generation: int) -> Rollout | Exception:
            _current.set((number, generation, []))
            begun = time.monotonic()
            try:
                rollout = await self.generate_one(prompt, self.tools, number)
                self._measures.durations.append(time.monotonic() - begun)
                return rollout
            except ServerUnavailable:
                raise
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                return RuntimeError(f"it raised CancelledError, though nobody cancelled it: {error}")
            except Exception as error:
                return error

        return list(await asyncio.gather(*(one(generation) for generation in range(count))))

    # ---- evaluation

    async def evaluate(self, request: int) -> t.EvalResult:
        """One rollout per held-out prompt with the weights that the server has now."""
        dataset = self._setup.eval_dataset
        rows = [dataset[i] for i in range(len(dataset))]
        gate = asyncio.Semaphore(self._cap.cap)

        failed: list[Exception] = []

        async def one(index: int) -> Rollout | None:
            async with gate:
                _current.set((-1 - index, request, []))
                try:
                    return await self.generate_one(rows[index]["prompt"], self.tools, -1 - index)
                except ServerUnavailable:
                    raise
                except Exception as error:
                    failed.append(error)
                    return None

        rollouts = await asyncio.gather(*(one(i) for i in range(len(rows))))
        pairs = [(row, rollout) for row, rollout in zip(rows, rollouts, strict=True) if rollout is not None]
        if not pairs:
            last = f": {type(failed[-1]).__name__}: {failed[-1]}" if failed else ""
            raise RuntimeError(f"evaluation: no held-out prompt could be generated for{last}")
        names = [key for key in pairs[0][0] if key != "prompt"]
        arguments = reward_arguments(
            [row["prompt"] for row, _ in pairs],
            [rollout.completion for _, rollout in pairs],
            [rollout.completion_ids for _, rollout in pairs],
            {name: [row[name] for row, _ in pairs] for name in names},
        )
        rewards = await self._score(arguments, len(pairs))
        unscored: NDArray[np.bool_] = np.logical_and.reduce(np.isnan(rewards))
        total = np.where(unscored, math.nan, np.nansum(rewards, axis=0))
        scored = total[~unscored]
        metrics = {
            "reward": float(scored.mean()) if len(scored) else math.nan,
            "reward_std": float(scored.std()) if len(scored) else math.nan,
            "mean_length": float(np.mean([trained_length(rollout) for _, rollout in pairs])),
            "clipped_ratio": 1 - float(np.mean([terminated(rollout, self.eos_token_ids) for _, rollout in pairs])),
            "prompts": float(len(pairs)),
        }
        for name, values in zip(self._reward_names, rewards, strict=True):
            metrics[f"rewards/{name}"] = float(np.nanmean(values)) if not np.isnan(values).all() else math.nan
        table = [
            {
                "prompt": row["prompt"],
                "completion": rollout.completion,
                "reward": None if unscored[i] else float(total[i]),
            }
            for i, (row, rollout) in enumerate(pairs[:20])
        ]
        return t.EvalResult(request, metrics, table)
