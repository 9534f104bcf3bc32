"""The loop of the rollout process: choose prompts, generate, score, hand over.

To change a step, subclass `AsyncRolloutLoop`, override its method and set the subclass as `loop_cls` of the trainer.
"""

import asyncio
import contextlib
import contextvars
import functools
import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from slipstream.algorithm.advantages import carries_signal, group_advantages
from slipstream.data import prompt_order
from slipstream.rollout import types as t
from slipstream.rollout.allowance import Outstanding, may_start
from slipstream.rollout.client import Choice, GenerationError, SamplingSettings, ServerUnavailable, VLLMClient
from slipstream.rollout.observe import length_observations, reward_observations, terminated, trained_length
from slipstream.rollout.scoring import score, total_rewards, unique_names
from slipstream.rollout.sequences import assign_costs, build_sequences
from slipstream.rollout.setup import LoopSetup, request_seed
from slipstream.rollout.types import GroupResult, Message, Rollout, RolloutGroup, TurnRecord
from slipstream.serving.labels import parse_label

BEAT_S = 0.5
POLL_S = 0.005
REPORT_S = 2.0
SCORERS = 4
RECENT_GROUPS = 64


class RolloutAborted(Exception):
    """A rollout in flight fell behind `max_staleness`."""


# (prompt number, generation, [turns so far]) of the rollout that is being generated
_current: contextvars.ContextVar[tuple[int, int, list[int]]] = contextvars.ContextVar("slipstream_rollout")


class AsyncRolloutLoop:
    """Generates and scores rollouts; implements GRPO with single-turn generation.

    Each prompt passes `filter_prompt`, `generate_one` (once per generation), the reward functions, and
    `compute_advantages` (once per group). `setup` and `close` run on the loop's event loop. A hook may read
    `self.config`, `self.tokenizer`, `self.model_version`.
    """

    def __init__(
        self,
        config: Any,
        model_name: str,
        dataset: Any,
        reward_funcs: list[Any],
        processing_class: Any,
        eos_token_ids: list[int],
        rollout_buffer: Any,
        model_version_value: Any,
        token_allowance: Any,
        heartbeat_value: Any,
        failed_event: Any,
        exception_info_queue: Any,
        metrics_queue: Any,
        tools: list[Any] | None = None,
        environment_factory: Any = None,
        score_queue_maxsize: int = 16,
        lora_name: str | None = None,
        dataset_start_index: int = 0,
        *,
        setup: LoopSetup,
        trainer_waits: Any,
        stop_event: Any,
        commands: Any,
    ) -> None:
        self.config = config
        self.model_name = model_name
        self.dataset = dataset
        self.reward_funcs = reward_funcs
        self.tokenizer = processing_class
        self.eos_token_ids = list(eos_token_ids)
        self.tools = tools or []
        self.environment_factory = environment_factory
        self.lora_name = lora_name
        self.dataset_start_index = dataset_start_index
        self._buffer = rollout_buffer
        self._version = model_version_value
        self._allowance = token_allowance
        self._heartbeat = heartbeat_value
        self._failed = failed_event
        self._exceptions = exception_info_queue
        self._metrics = metrics_queue
        self._setup = setup
        self._trainer_waits = trainer_waits
        self._stop_event = stop_event
        self._commands = commands

        self._reward_names = unique_names(reward_funcs)
        self._groups: dict[asyncio.Task[None], int] = {}  # task of a group in flight -> its version at the start
        self._score_queue: asyncio.Queue[tuple[int, RolloutGroup, list[Rollout | None]]] = asyncio.Queue(
            score_queue_maxsize
        )
        self._scoring = 0
        self._finished_cost = 0
        self._recent_costs: deque[int] = deque(maxlen=RECENT_GROUPS)
        self._handed_over = 0
        self._rollouts_ok = 0
        self._rollouts_failed = 0
        self._in_flight_rollouts = 0
        self._generated_tokens = 0
        self._retries = 0
        self._waits: list[float] = []
        self._fatal: asyncio.Future[None] | None = None
        head = config.num_sampler_logprobs if config.score_centering else 0
        self._client = VLLMClient(
            config.vllm_server_base_url,
            model_name,
            SamplingSettings(
                config.temperature, config.top_p, config.top_k, config.min_p, head, tuple(self.eos_token_ids)
            ),
            token_file=config.vllm_server_token_file,
            timeout_s=config.vllm_server_timeout,
            use_generate_route=setup.use_generate_route,
            on_retry=self._count_retry,
        )

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
        """What a checkpoint must keep of the loop; handed to `load_state_dict` on resume. JSON-able."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    # ---- helpers for hooks

    @property
    def model_version(self) -> int:
        """The version of the weights delivered last."""
        return int(self._version.value)

    def render(self, prompt: list[Message]) -> list[int]:
        """Token ids of a prompt in the model's chat template."""
        kwargs = self.config.chat_template_kwargs or {}
        encoded = self.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **kwargs
        )
        return list(encoded["input_ids"])

    # ---- generation

    def _room(self, prompt_ids: list[int]) -> int:
        return min(self.config.max_completion_length, self._setup.max_model_len - len(prompt_ids))

    def _turn(self, prompt_ids: list[int], choice: Choice, started: int) -> TurnRecord:
        if self._setup.use_generate_route:
            parsed = [parse_label(label or "", self._setup.run_id, self._setup.attempt) for label in choice.labels]
            versions = [-1 if version is None else version for version in parsed]
        else:
            versions = [started] * len(choice.token_ids)
        self._generated_tokens += len(choice.token_ids)
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
            started = self.model_version
            seed = request_seed(self._setup.seed, number, 0, 0, self._setup.attempt)
            try:
                choices = await self._client.generate(
                    prompt_ids, n=count, max_tokens=self._room(prompt_ids), seed=seed, lora=self.lora_name
                )
            except GenerationError as error:
                return [error] * count
            return [self._single_turn(self._turn(prompt_ids, choice, started)) for choice in choices]

        async def one(generation: int) -> Rollout | Exception:
            _current.set((number, generation, []))
            try:
                return await self.generate_one(prompt, self.tools, number)
            except ServerUnavailable:
                raise
            except Exception as error:
                return error

        return list(await asyncio.gather(*(one(generation) for generation in range(count))))

    async def _run_group(
        self, number: int, row_index: int, row: dict[str, Any], prompt_ids: list[int], version: int
    ) -> None:
        begun = time.monotonic()
        outcomes = await self._generate_group(number, row["prompt"], prompt_ids)
        failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        self._rollouts_failed += len(failed)
        self._rollouts_ok += len(outcomes) - len(failed)
        if failed and self._rollouts_ok == 0 and self._rollouts_failed >= 2 * self.config.num_generations:
            raise RuntimeError(
                f"the first {self._rollouts_failed} rollouts all failed; the last with {type(failed[-1]).__name__}: {failed[-1]}"
            ) from failed[-1]
        rollouts = [None if isinstance(outcome, Exception) else outcome for outcome in outcomes]
        columns = {key: [value] * len(rollouts) for key, value in row.items() if key != "prompt"}
        group = RolloutGroup(
            prompts=[row["prompt"]] * len(rollouts),
            reward_kwargs=columns,
            completions=[r.completion if r else [] for r in rollouts],
            completions_ids=[r.completion_ids if r else [] for r in rollouts],
            completions_sequences=[build_sequences(r.turns) if r else [] for r in rollouts],
            tool_call_counts=[r.tool_call_count if r else 0 for r in rollouts],
            tool_failure_counts=[r.tool_failure_count if r else 0 for r in rollouts],
            model_version=version,
            group_id=number,
            row_index=row_index,
            env_rewards=[None] * len(rollouts),
            rollout_rewards=[r.reward if r else None for r in rollouts],
            queued_at=time.monotonic(),
        )
        self._metrics.put([("rollout/duration_s", time.monotonic() - begun, len(rollouts))])
        blocked = time.monotonic()
        self._scoring += 1
        try:
            await self._score_queue.put((number, group, rollouts))
        except BaseException:
            self._scoring -= 1
            raise
        if time.monotonic() - blocked > 0.001:
            self._metrics.put([("rollout/score_block_s", time.monotonic() - blocked, 1)])

    # ---- scoring

    async def _score_groups(self) -> None:
        while True:
            number, group, rollouts = await self._score_queue.get()
            try:
                result = await self._score_group(number, group, rollouts)
            finally:
                self._scoring -= 1
            self._hand_over(result)

    async def _score_group(self, number: int, group: RolloutGroup, rollouts: list[Rollout | None]) -> GroupResult:
        begun = time.monotonic()
        alive = [i for i, rollout in enumerate(rollouts) if rollout is not None]
        by_function = np.full((len(self.reward_funcs), len(rollouts)), math.nan)
        if alive:
            arguments = {
                "prompts": [group.prompts[i] for i in alive],
                "completions": [group.completions[i] for i in alive],
                "completion_ids": [group.completions_ids[i] for i in alive],
                **{key: [values[i] for i in alive] for key, values in group.reward_kwargs.items()},
            }
            by_function[:, alive] = await score(
                self.reward_funcs, self._reward_names, self._executor, arguments, len(alive)
            )
        group.rewards = total_rewards(by_function, group)
        advantages = np.asarray(self.compute_advantages(group), dtype=np.float64)
        if advantages.shape != group.rewards.shape:
            raise ValueError(
                f"compute_advantages returned shape {advantages.shape} for {group.rewards.shape[0]} rollouts"
            )
        advantages = np.where(np.isnan(group.rewards), 0.0, advantages)

        dropped: dict[str, int] = {}

        def drop(reason: str, count: int = 1) -> None:
            dropped[reason] = dropped.get(reason, 0) + count

        kept = carries_signal(group.rewards)
        samples = []
        scored = group.rewards[~np.isnan(group.rewards)]
        spread = {
            name: float(np.nanstd(values)) if not np.isnan(values).all() else math.nan
            for name, values in zip(self._reward_names, by_function, strict=True)
        }
        for i, rollout in enumerate(rollouts):
            if rollout is None:
                drop(t.FAILED)
                continue
            if not kept:
                drop(t.ZERO_STD if len(scored) >= 2 else t.UNSCORED)
                continue
            if not group.completions_sequences[i]:
                drop(t.EMPTY_COMPLETION)
            for sample in group.completions_sequences[i]:
                if sample.versions[sample.trained].min() < 0:
                    drop(t.FOREIGN)
                    continue
                sample.advantage = float(advantages[i])
                sample.number = number
                sample.rollout_id = rollout.rollout_id
                sample.reward = float(group.rewards[i])
                sample.group_std = float(scored.std())
                sample.rewards_by_name = {
                    name: (float(by_function[k, i]), spread[name]) for k, name in enumerate(self._reward_names)
                }
                samples.append(sample)
        present = [rollout for rollout in rollouts if rollout is not None]
        observations = [
            *reward_observations(group.rewards),
            *length_observations(present, self.eos_token_ids),
            ("rollout/score_s", time.monotonic() - begun, 1),
            ("rollout/score_wait_s", begun - group.queued_at, 1),
        ]
        if present:
            turns = [len(rollout.turns) for rollout in present]
            observations.append(("rollout/turns_mean", float(np.mean(turns)), len(turns)))
            observations.append(("rollout/turns_max", max(turns), 1))
            made = sum(len(sequences) for sequences in group.completions_sequences)
            observations.append(("rollout/samples_per_rollout", made / len(present), len(present)))
        epoch, position = divmod(number, len(self.dataset))
        return GroupResult(
            number=number,
            epoch=epoch,
            position=position,
            row_index=group.row_index,
            samples=samples,
            dropped=dropped,
            cost=assign_costs(samples) if samples else 0,
            observations=observations,
            table=self._table(number, group, rollouts, advantages) if self.config.log_completions else [],
        )

    def _table(
        self, number: int, group: RolloutGroup, rollouts: list[Rollout | None], advantages: np.ndarray
    ) -> list[dict[str, Any]]:
        assert group.rewards is not None
        return [
            {
                "prompt_number": number,
                "rollout_id": rollout.rollout_id,
                "version": group.model_version,
                "prompt": group.prompts[i],
                "completion": rollout.completion,
                "reward": None if math.isnan(group.rewards[i]) else float(group.rewards[i]),
                "advantage": float(advantages[i]),
            }
            for i, rollout in enumerate(rollouts)
            if rollout is not None
        ]

    # ---- handing over

    def _hand_over(self, result: GroupResult) -> None:
        now = time.monotonic()
        for sample in result.samples:
            sample.queued_at = now
        if result.samples or sum(result.dropped.values()) > 1:
            self._recent_costs.append(max(result.cost, 1))
        self._finished_cost += result.cost
        self._handed_over += 1
        self._buffer.put(result)

    def _drop_prompt(self, number: int, row_index: int, reason: str) -> None:
        epoch, position = divmod(number, len(self.dataset))
        self._hand_over(GroupResult(number, epoch, position, row_index, [], {reason: 1}))

    def _outstanding(self) -> Outstanding:
        costs = [cost for cost in self._recent_costs if cost > 1] or list(self._recent_costs)
        mean = sum(costs) / len(costs) if costs else None
        return Outstanding(self._finished_cost, len(self._groups), self._scoring, mean)

    def _may_start(self) -> bool:
        room = self._in_flight_rollouts + self.config.num_generations <= self.config.max_concurrent_rollouts
        if self._groups and not room:
            return False
        return may_start(self._outstanding(), int(self._allowance.value), bool(self._trainer_waits.value))

    async def _dispatch(self) -> None:
        """Start groups in prompt order as the bounds allow; at the end of the data wait for the last, and say so."""
        order_of: tuple[int, Any] = (-1, None)
        filtered_epoch, rejected = -1, 0
        for number in self._setup.position.numbers(self._setup.end):
            epoch, position = divmod(number, len(self.dataset))
            if order_of[0] != epoch:
                order_of = (epoch, prompt_order(len(self.dataset), epoch, self._setup.seed, self._setup.shuffle))
            row_index = int(order_of[1][position])
            row = self.dataset[row_index]
            if not self.filter_prompt(row_index, row, epoch):
                filtered_epoch, rejected = epoch, rejected + 1 if filtered_epoch == epoch else 1
                if rejected >= len(self.dataset):
                    raise RuntimeError(f"filter_prompt rejected every prompt of epoch {epoch}: nothing can be trained")
                self._drop_prompt(number, row_index, t.FILTERED)
                continue
            prompt_ids = self.render(row["prompt"])
            if self._room(prompt_ids) < 1:
                self._drop_prompt(number, row_index, t.OVERSIZE_PROMPT)
                await asyncio.sleep(0)
                continue
            begun = time.monotonic()
            while not self._may_start():
                await asyncio.sleep(POLL_S)
            if time.monotonic() - begun > 2 * POLL_S:
                self._waits.append(time.monotonic() - begun)
            version = self.model_version
            task = asyncio.create_task(self._run_group(number, row_index, row, prompt_ids, version))
            self._groups[task] = version
            self._in_flight_rollouts += self.config.num_generations
            task.add_done_callback(functools.partial(self._group_done, number, row_index))
            await asyncio.sleep(0)
        while self._groups or self._scoring:
            await asyncio.sleep(POLL_S)
        self._buffer.put(t.EndOfData(self._handed_over))

    def _group_done(self, number: int, row_index: int, task: asyncio.Task[None]) -> None:
        self._groups.pop(task, None)
        self._in_flight_rollouts -= self.config.num_generations
        if task.cancelled():
            if not self._stopping:
                self._hand_over_stale(number, row_index)
        elif (error := task.exception()) is not None and self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    def _hand_over_stale(self, number: int, row_index: int) -> None:
        epoch, position = divmod(number, len(self.dataset))
        count = self.config.num_generations
        self._hand_over(GroupResult(number, epoch, position, row_index, [], {t.STALE: count}))

    def _abort_stale(self) -> None:
        """Cancel groups in flight that are beyond the bound already; the server sees the closed connection."""
        limit = self.model_version - self.config.max_staleness
        for task, version in list(self._groups.items()):
            if version < limit:
                task.cancel()

    # ---- evaluation

    async def evaluate(self, request: int) -> t.EvalResult:
        """One rollout per held-out prompt with the weights that the server has now."""
        dataset = self._setup.eval_dataset
        rows = [dataset[i] for i in range(len(dataset))]
        gate = asyncio.Semaphore(self.config.max_concurrent_rollouts)

        async def one(index: int) -> Rollout | None:
            async with gate:
                _current.set((-1 - index, request, []))
                try:
                    return await self.generate_one(rows[index]["prompt"], self.tools, -1 - index)
                except GenerationError:
                    return None

        rollouts = await asyncio.gather(*(one(i) for i in range(len(rows))))
        pairs = [(row, rollout) for row, rollout in zip(rows, rollouts, strict=True) if rollout is not None]
        if not pairs:
            raise RuntimeError("evaluation: no held-out prompt could be generated for")
        names = [key for key in pairs[0][0] if key != "prompt"]
        arguments = {
            "prompts": [row["prompt"] for row, _ in pairs],
            "completions": [rollout.completion for _, rollout in pairs],
            "completion_ids": [rollout.completion_ids for _, rollout in pairs],
            **{name: [row[name] for row, _ in pairs] for name in names},
        }
        rewards = await score(self.reward_funcs, self._reward_names, self._executor, arguments, len(pairs))
        total = np.nansum(rewards, axis=0)
        metrics = {
            "reward": float(total.mean()),
            "reward_std": float(total.std()),
            "mean_length": float(np.mean([trained_length(rollout) for _, rollout in pairs])),
            "clipped_ratio": 1 - float(np.mean([terminated(rollout, self.eos_token_ids) for _, rollout in pairs])),
            "prompts": float(len(pairs)),
        }
        for name, values in zip(self._reward_names, rewards, strict=True):
            metrics[f"rewards/{name}"] = float(np.nanmean(values)) if not np.isnan(values).all() else math.nan
        table = [
            {"prompt": row["prompt"], "completion": rollout.completion, "reward": float(total[i])}
            for i, (row, rollout) in enumerate(pairs[:20])
        ]
        return t.EvalResult(request, metrics, table)

    # ---- life

    def _count_retry(self) -> None:
        self._retries += 1

    async def _serve(self) -> None:
        """Beat, report, abort what is too old, answer commands; returns when asked to stop."""
        reported, tokens = time.monotonic(), 0
        pending: set[asyncio.Task[None]] = set()

        async def answer(request: int) -> None:
            self._buffer.put(await self.evaluate(request))

        while not self._stop_event.is_set():
            now = time.monotonic()
            self._heartbeat.value = now
            self._abort_stale()
            while not self._commands.empty():
                kind, argument = self._commands.get()
                if kind == "evaluate":
                    task = asyncio.create_task(answer(argument))
                    pending.add(task)
                    task.add_done_callback(self._raise_fatal)
                elif kind == "state":
                    self._buffer.put(("state", argument, self.state_dict()))
            if now - reported >= REPORT_S:
                self._report(now - reported, self._generated_tokens - tokens)
                reported, tokens = now, self._generated_tokens
            await asyncio.sleep(min(BEAT_S, 0.05))

    def _raise_fatal(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    def _report(self, seconds: float, tokens: int) -> None:
        found: list[t.Observation] = [
            ("rollout/generated_tokens_per_s", tokens / seconds, seconds),
            ("rollout/concurrency", self._in_flight_rollouts, 1),
            ("rollout/concurrency_cap", self.config.max_concurrent_rollouts, 1),
            ("rollout/score_queue_size", self._score_queue.qsize(), 1),
            ("rollout/vllm_retry_count", self._retries, 1),
        ]
        self._retries = 0
        waits, self._waits = self._waits, []
        found.append(("rollout/backpressure_s", sum(waits) / len(waits) if waits else 0.0, max(len(waits), 1)))
        self._metrics.put(found)

    async def _main(self) -> None:
        self._stopping = False
        self._fatal = asyncio.get_running_loop().create_future()
        self._executor = ThreadPoolExecutor(max_workers=16, thread_name_prefix="reward")
        await self._client.open()
        tasks: list[asyncio.Task[None]] = []
        serve = asyncio.create_task(self._serve())
        try:
            if self._setup.loop_state:
                self.load_state_dict(self._setup.loop_state)
            await self.setup()
            tasks = [asyncio.create_task(self._score_groups()) for _ in range(SCORERS)]
            tasks.append(asyncio.create_task(self._dispatch()))
            for task in tasks:
                task.add_done_callback(self._raise_fatal)
            await asyncio.wait([serve, self._fatal], return_when=asyncio.FIRST_COMPLETED)
            if self._fatal.done():
                self._fatal.result()
            serve.result()
        finally:
            self._stopping = True
            for task in [serve, *tasks, *self._groups]:
                task.cancel()
            await asyncio.gather(serve, *tasks, *self._groups, return_exceptions=True)
            if not self._fatal.done():
                self._fatal.cancel()
            with contextlib.suppress(Exception):
                await self.close()
            await self._client.close()
            self._executor.shutdown(wait=False, cancel_futures=True)

    def run(self) -> None:
        """Run until asked to stop. Raises what went wrong."""
        asyncio.run(self._main())
