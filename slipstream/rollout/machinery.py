"""The machinery of the rollout loop: everything that is not a hook."""

import asyncio
import contextlib
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from slipstream.rollout import types as t
from slipstream.rollout.allowance import Outstanding, is_ahead, may_start
from slipstream.rollout.beat import StorageBeat
from slipstream.rollout.client import SamplingSettings
from slipstream.rollout.concurrency import ConcurrencyCap
from slipstream.rollout.grading import Grading
from slipstream.rollout.measures import LoadWatch, Measures
from slipstream.rollout.prompts import Prompt, RejectionWatch, read_prompts
from slipstream.rollout.scoring import unique_names
from slipstream.rollout.sequences import sort_out
from slipstream.rollout.server_load import parse_load
from slipstream.rollout.server_watch import make_client
from slipstream.rollout.setup import LoopSetup, checked_state
from slipstream.rollout.types import GroupResult, Message, Rollout, RolloutGroup

logger = logging.getLogger(__name__)

BEAT_S = 0.05
POLL_S = 0.005
REPORT_S = 2.0
SERVER_POLL_S = 5.0
SCORERS = 4
RECENT_GROUPS = 64
REWARD_THREADS = 16


class LoopMachinery(Grading, ABC):
    """Chooses prompts, keeps the bounds, scores groups and hands them over; the hooks are `AsyncRolloutLoop`'s."""

    server_poll_s = SERVER_POLL_S
    report_s = REPORT_S

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
        # task of a group in flight -> its version at the start, and how many were started before it
        self._groups: dict[asyncio.Task[None], tuple[int, int]] = {}
        self._started = 0
        self._newest_generated = -1  # of the groups that are generated, the one started last
        self._score_queue: asyncio.Queue[tuple[Prompt, RolloutGroup, list[Rollout | None]]] = asyncio.Queue(
            score_queue_maxsize
        )
        self._scoring = 0
        self._finished_cost = setup.finished_cost
        # after a resume the size of groups is known: the first must not hold up all others a second time
        known = [] if setup.group_tokens is None else [setup.group_tokens]
        self._recent_costs: deque[float] = deque(known, maxlen=RECENT_GROUPS)
        self._handed_over = 0
        self._rollouts_ok = 0
        self._rollouts_failed = 0
        self._in_flight_rollouts = 0
        self._measures = Measures(time.monotonic())
        self._cap = ConcurrencyCap(
            config.max_concurrent_rollouts, config.num_generations, setup.kv_cache_tokens, setup.max_model_len
        )
        self._fatal: asyncio.Future[None] | None = None
        self._beat = StorageBeat(config)
        head = config.num_sampler_logprobs if config.score_centering else 0
        sampling = SamplingSettings(
            config.temperature, config.top_p, config.top_k, config.min_p, head, tuple(self.eos_token_ids)
        )
        self._client = make_client(config, setup, model_name, sampling, self._count_retry)

    # ---- what a loop adds

    @abstractmethod
    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool: ...

    @abstractmethod
    def compute_advantages(self, group: RolloutGroup) -> np.ndarray: ...

    @abstractmethod
    async def setup(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    async def evaluate(self, request: int) -> t.EvalResult: ...

    @abstractmethod
    async def _generate_group(
        self, number: int, prompt: list[Message], prompt_ids: list[int]
    ) -> list[Rollout | Exception]: ...

    # ---- helpers, for hooks too

    @property
    def model_version(self) -> int:
        """The version of the weights delivered last."""
        return int(self._version.value)

    def render(self, prompt: list[Message]) -> list[int]:
        """Token ids of a prompt in the model's chat template."""
        kwargs = self.config.chat_template_kwargs or {}
        # a column of messages with differing keys comes back from storage with the missing ones as None
        prompt = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        encoded = self.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **kwargs
        )
        return list(encoded["input_ids"])

    def _room(self, prompt_ids: list[int]) -> int:
        return min(self.config.max_completion_length, self._setup.max_model_len - len(prompt_ids))

    async def _run_group(self, prompt: Prompt, prompt_ids: list[int], version: int) -> None:
        row = prompt.row
        outcomes = await self._generate_group(prompt.number, row["prompt"], prompt_ids)
        rollouts, sequences, failed = sort_out(outcomes)
        self._rollouts_failed += len(failed)
        self._rollouts_ok += len(outcomes) - len(failed)
        if failed:
            last = f"{type(failed[-1]).__name__}: {failed[-1]}"
            logger.warning("prompt %d: %d of %d rollouts failed: %s", prompt.number, len(failed), len(outcomes), last)
        if failed and self._rollouts_ok == 0 and self._rollouts_failed >= 2 * self.config.num_generations:
            raise RuntimeError(
                f"the first {self._rollouts_failed} rollouts all failed; the last with {type(failed[-1]).__name__}: {failed[-1]}"
            ) from failed[-1]
        columns = {key: [value] * len(rollouts) for key, value in row.items() if key != "prompt"}
        group = RolloutGroup(
            prompts=[row["prompt"]] * len(rollouts),
            reward_kwargs=columns,
            completions=[r.completion if r else [] for r in rollouts],
            completions_ids=[r.completion_ids if r else [] for r in rollouts],
            completions_sequences=sequences,
            tool_call_counts=[r.tool_call_count if r else 0 for r in rollouts],
            tool_failure_counts=[r.tool_failure_count if r else 0 for r in rollouts],
            model_version=version,
            group_id=prompt.number,
            row_index=prompt.row_index,
            env_rewards=[None] * len(rollouts),
            rollout_rewards=[r.reward if r else None for r in rollouts],
            queued_at=time.monotonic(),
        )
        blocked = time.monotonic()
        self._scoring += 1
        try:
            await self._score_queue.put((prompt, group, rollouts))
        except BaseException:
            self._scoring -= 1
            raise
        self._metrics.put([("rollout/score_block_s", time.monotonic() - blocked, 1)])

    # ---- handing over

    def _hand_over(self, result: GroupResult) -> None:
        now = time.monotonic()
        for sample in result.samples:
            sample.queued_at = now
        self._finished_cost += result.cost
        self._handed_over += 1
        self._buffer.put(result)

    def _drop_prompt(self, prompt: Prompt, reason: str, count: int = 1) -> None:
        self._hand_over(
            GroupResult(prompt.number, prompt.epoch, prompt.position, prompt.row_index, [], {reason: count})
        )

    def _outstanding(self) -> Outstanding:
        costs = self._recent_costs
        mean = sum(costs) / len(costs) if costs else None
        overtaken = sum(started < self._newest_generated for _, started in self._groups.values())
        return Outstanding(self._finished_cost, len(self._groups), self._scoring, mean, overtaken)

    def _may_start(self) -> bool:
        if self._groups and not self._cap.has_room(self._in_flight_rollouts):
            return False
        return may_start(self._outstanding(), int(self._allowance.value), bool(self._trainer_waits.value))

    async def _wait_for_leave(self) -> None:
        """Wait until one more group may start, and keep account of how long the staleness bound was the reason."""
        held = 0.0
        while not self._may_start():
            state, allowance = self._outstanding(), int(self._allowance.value)
            ahead = is_ahead(state, allowance)
            begun = time.monotonic()
            await asyncio.sleep(POLL_S)
            if ahead:
                held += time.monotonic() - begun
                self._measures.held_s += time.monotonic() - begun
        if held > 2 * POLL_S:
            self._measures.waits.append(held)

    async def _dispatch(self) -> None:
        """Start groups in prompt order as the bounds allow; at the end of the data wait for the last, and say so."""
        watch = RejectionWatch(self._setup.position.last_settled)
        begun_prompts = 0
        async for prompt in read_prompts(self.dataset, self._setup):
            begun_prompts += 1
            admitted = self.filter_prompt(prompt.row_index, prompt.row, prompt.epoch)
            watch.see(prompt, not admitted)
            if not admitted:
                self._drop_prompt(prompt, t.FILTERED)
                await asyncio.sleep(0)
                continue
            prompt_ids = self.render(prompt.row["prompt"])
            if self._room(prompt_ids) < 1:
                self._drop_prompt(prompt, t.OVERSIZE_PROMPT)
                await asyncio.sleep(0)
                continue
            await self._wait_for_leave()
            version = self.model_version
            task = asyncio.create_task(self._run_group(prompt, prompt_ids, version))
            self._groups[task] = version, self._started
            self._started += 1
            self._in_flight_rollouts += self.config.num_generations
            task.add_done_callback(functools.partial(self._group_done, prompt))
            await asyncio.sleep(0)
        watch.check()
        # counted, not inferred from what is under way: a group that ended in an exception is never handed over
        while self._handed_over < begun_prompts:
            await asyncio.sleep(POLL_S)
        self._buffer.put(t.EndOfData(self._handed_over, self._report()))

    def _group_done(self, prompt: Prompt, task: asyncio.Task[None]) -> None:
        _, started = self._groups.pop(task)
        self._in_flight_rollouts -= self.config.num_generations
        self._cap.finished(self.config.num_generations)
        if task.cancelled():
            if not self._stopping:
                self._drop_prompt(prompt, t.STALE, self.config.num_generations)
        elif (error := task.exception()) is None:
            self._newest_generated = max(self._newest_generated, started)
        elif self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    def _abort_stale(self) -> None:
        """Cancel groups in flight that are beyond the bound already; the server sees the closed connection."""
        limit = self.model_version - self.config.max_staleness
        for task, (version, _) in list(self._groups.items()):
            if version < limit:
                task.cancel()

    # ---- life

    def _count_retry(self) -> None:
        self._measures.retries += 1

    async def _serve(self) -> None:
        """Beat, report, abort what is too old, answer commands; returns when asked to stop."""
        self._measures.begin(time.monotonic())
        pending: set[asyncio.Task[None]] = set()
        state_requests: list[int] = []
        evaluations: list[int] = []

        async def answer(request: int) -> None:
            self._buffer.put(await self.evaluate(request))

        while not self._stop_event.is_set():
            now = time.monotonic()
            self._heartbeat.value = now
            self._beat.update("generating" if self._groups else "waiting", self._handed_over)
            self._abort_stale()
            while not self._commands.empty():
                kind, argument = self._commands.get()
                {"evaluate": evaluations, "state": state_requests}[kind].append(argument)
            while self._is_set_up and evaluations:
                task = asyncio.create_task(answer(evaluations.pop(0)))
                pending.add(task)
                task.add_done_callback(self._raise_fatal)
            while self._is_set_up and state_requests:
                self._buffer.put(("state", state_requests.pop(), checked_state(type(self).__name__, self.state_dict())))
            if now - self._measures.begun >= self.report_s:
                self._metrics.put(self._report())
            await asyncio.sleep(BEAT_S)

    def _raise_fatal(self, task: asyncio.Task[None]) -> None:
        if self._fatal is None or self._fatal.done():
            return
        if not task.cancelled():
            if error := task.exception():
                self._fatal.set_exception(error)
        elif not self._stopping:  # nobody here does that, and without the task the run would wait for ever
            self._fatal.set_exception(RuntimeError("a hook or the dataset raised asyncio.CancelledError"))

    def _report(self) -> list[t.Observation]:
        """What was measured since the last report."""
        levels = self._in_flight_rollouts, self._cap.cap, self._score_queue.qsize()
        return self._measures.report(time.monotonic(), *levels)

    async def _follow_load(self) -> None:
        """Poll the server's load, let the cap follow it, and report it."""
        watch = LoadWatch()
        while True:
            text = None
            with contextlib.suppress(TimeoutError):
                text = await asyncio.wait_for(self._client.get_text("/metrics"), self.server_poll_s)
            load = parse_load(text)
            self._cap.observe(load, self._in_flight_rollouts)
            if load is not None:
                self._metrics.put(watch.observations(load))
            await asyncio.sleep(self.server_poll_s)

    async def _main(self) -> None:
        self._stopping = self._is_set_up = False
        self._fatal = asyncio.get_running_loop().create_future()
        self._executor = ThreadPoolExecutor(max_workers=16, thread_name_prefix="reward")
        self._beat.start()
        await self._client.open()
        tasks = [asyncio.create_task(self._client.follow())]
        serve = asyncio.create_task(self._serve())
        try:
            await self.setup()
            if self._setup.loop_state:
                self.load_state_dict(self._setup.loop_state)
            self._is_set_up = True
            tasks += [asyncio.create_task(self._score_groups()) for _ in range(SCORERS)]
            tasks.append(asyncio.create_task(self._dispatch()))
            tasks.append(asyncio.create_task(self._follow_load()))
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
            self._beat.stop()

    def run(self) -> None:
        """Run until asked to stop. Raises what went wrong."""
        asyncio.run(self._main())
