"""The pipeline of a live run: the server's connection and the rollout process."""

import dataclasses
import functools
import logging
import queue
import warnings
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.learner.inbox import Inbox
from slipstream.learner.pipeline import Pipeline, Resumed, starting_point
from slipstream.learner.replay import RECORDING, Recorder
from slipstream.learner.server_link import ServerLink
from slipstream.learner.sync import PolicySync
from slipstream.process import new_incarnation
from slipstream.rollout.machinery import RECENT_GROUPS
from slipstream.rollout.setup import LoopSetup, Position
from slipstream.rollout.types import EvalResult, GroupResult
from slipstream.rollout.worker import RolloutWorker, dump_for_child
from slipstream.run_folder import RunFolder
from slipstream.serving.probe import Capabilities, check

if TYPE_CHECKING:
    from slipstream.learner.trainer import AsyncGRPOTrainer

logger = logging.getLogger(__name__)


class LivePipeline(Pipeline):
    """Made before the model is prepared, so that the processes start side by side."""

    def __init__(self, trainer: "AsyncGRPOTrainer", end: int | None, resumed: Resumed | None) -> None:
        """`end`: prompt number at which the data ends, or None. Raises ServerNotUsable, ServerError, NotPicklable."""
        for function in trainer.reward_funcs:  # before the server is waited for
            dump_for_child("reward_funcs", function)
        dump_for_child("loop_cls", trainer.loop_cls)
        config = trainer.args
        self.run_id = RunFolder(config.run_dir).run_id if config.run_dir else f"script-{new_incarnation()}"
        self.link = ServerLink(
            config,
            self.run_id,
            functools.partial(server_problems, config=config),
            trainer.reporter,
            lambda: trainer.state.global_step,
        )
        trainer.reporter.phase("probing the server")
        self.link.attach()
        self.link.leaving = lambda: bool(trainer._leave.why)
        config.vllm_server_base_url = self.link.control.base_url
        self.capabilities = self.link.capabilities
        max_model_len = int(self.capabilities.max_model_len or 0)
        budget = config.token_budget or max_model_len
        self._recorder = Recorder(recording_path(config), budget) if config.record_samples else None
        self.worker = RolloutWorker(
            trainer.loop_cls,
            {
                "config": config,
                "model_name": self.capabilities.model,
                "dataset": trainer.train_dataset,
                "reward_funcs": trainer.reward_funcs,
                "processing_class": trainer.processing_class,
                "eos_token_ids": trainer.eos_token_ids,
            },
            self._setup(trainer, end, resumed, max_model_len),
            config.rollout_worker_timeout,
        )
        self.worker.version.value = resumed[0].model_version if resumed else 0  # what staleness counts from
        self.worker.start()
        known = resumed[0].group_tokens if resumed else None
        self._sizes: deque[float] = deque([] if known is None else [known], maxlen=RECENT_GROUPS)
        self._last_loop_state = self.worker.setup.loop_state
        self._inbox = Inbox(
            self.worker,
            self._group_arrived,
            position=self.worker.setup.position,
            restarts=config.rollout_worker_restarts,
            renew=self._setup_again,
            on_restart=self._restarted,
        )
        self._state_requests = 0
        super().__init__(trainer, self._inbox, budget, resumed)

    def _setup(
        self, trainer: "AsyncGRPOTrainer", end: int | None, resumed: Resumed | None, max_model_len: int
    ) -> LoopSetup:
        position, remainder = starting_point(resumed)
        shuffle, seed = trainer._order
        return LoopSetup(
            run_id=self.run_id,
            attempt=trainer.args.attempt,
            served_model=self.capabilities.model,
            use_generate_route=self.capabilities.has_generate_route,
            returns_candidates=self.capabilities.sampling_mask and self.capabilities.has_generate_route,
            max_model_len=max_model_len,
            # what rank 0 still holds is neither settled nor to be generated again
            position=Position(position.first_unsettled, position.settled_beyond | {s.number for s in remainder}),
            end=end,
            epochs=trainer.duration.epochs,
            first_epoch=resumed[0].epoch if resumed and trainer.num_prompts is None else 0,
            shuffle=shuffle,
            seed=seed,
            eval_dataset=trainer.eval_dataset,
            loop_state=resumed[0].loop_state if resumed else None,
            kv_cache_tokens=self.capabilities.kv_cache_tokens,
            group_tokens=resumed[0].group_tokens if resumed else None,
            server_incarnation=self.link.incarnation,
        )

    def _setup_again(self, position: Position, cost: int) -> LoopSetup:
        """For a process that takes the place of a lost one: with the state that the loop gave last, at a checkpoint."""
        return dataclasses.replace(
            self.worker.setup,
            position=position,
            finished_cost=cost,
            loop_state=self._last_loop_state,
            group_tokens=self.group_tokens(),
        )

    def _restarted(self, reason: str, count: int) -> None:
        trainer = self._trainer
        most = trainer.args.rollout_worker_restarts
        logger.warning("%s It is started again (%d of %d without a group in between)", reason, count, most)
        first = self.worker.setup.position.first_unsettled
        trainer.reporter.event(
            "rollout_worker_restarted", trainer.state.global_step, reason=reason, count=count, first_prompt=first
        )

    def _group_arrived(self, group: GroupResult) -> None:
        trainer = self._trainer
        trainer.reporter.advance()
        if self._recorder is not None:
            self._recorder(group)
        if group.size:
            self._sizes.append(group.size)
        if group.table:
            shown = trainer.args.num_completions_to_print
            trainer.reporter.completions(trainer.state.global_step, group.table[:shown])
            trainer.completions.extend(group.table)

    def make_sync(self, version: int) -> PolicySync:
        transport, dtype = self.link.transport()
        return PolicySync(transport, self.run_id, self._trainer.args.attempt, dtype, version, server=self.link)

    def server_moved(self) -> bool:
        return self.link.moved()

    def server_absent(self) -> bool:
        return self.link.absent()

    def set_version(self, version: int) -> None:
        self.worker.version.value = version

    def drain_metrics(self) -> None:
        while True:
            try:
                self._trainer._window.add_all(self.worker.metrics.get_nowait())
            except (queue.Empty, EOFError, OSError):  # a process that was killed has no more
                break
        self._trainer._window.add_all(self._inbox.last_report())

    def evaluate(self, request: int) -> dict[str, float]:
        """Raises LeaveRequested too."""
        self._inbox.ask("evaluate", request)
        result: EvalResult = self._inbox.answer("evaluate", request, self._trainer.while_evaluating)
        return result.metrics

    def loop_state(self) -> dict[str, Any]:
        self._state_requests += 1
        self._inbox.ask("state", self._state_requests)
        self._last_loop_state = self._inbox.answer("state", self._state_requests)
        return dict(self._last_loop_state or {})

    def group_tokens(self) -> float | None:
        sizes = list(self._sizes)
        return sum(sizes) / len(sizes) if sizes else None

    def close(self) -> None:
        self.worker.stop()
        self._inbox.close()
        super().close()
        self.link.close()


def recording_path(config: Any) -> Path:
    """Where an attempt's samples are recorded: among the run's records; outside a run, in the output_dir."""
    folder = RunFolder(config.run_dir).records(config.attempt) if config.run_dir else Path(config.output_dir)
    return folder / RECORDING


def server_problems(capabilities: Capabilities, config: Any) -> list[str]:
    """What a training with `config` misses on a server, each with the way out."""
    problems = check(
        capabilities,
        num_sampler_logprobs=config.num_sampler_logprobs if config.score_centering else 0,
        max_model_len=config.max_completion_length + 1,
        num_generations=config.num_generations,
    )
    if capabilities.max_model_len is None:
        problems.append("it does not say its max_model_len in /v1/models")
    return problems + candidate_problems(capabilities, config)


def candidate_problems(capabilities: Capabilities, config: Any) -> list[str]:
    """What stands in the way of sampling with the config's top-k, top-p and min-p.

    Warns where the server cannot return candidate sets: the ratio is then taken over the whole vocabulary.
    """
    truncates = config.top_k > 0 or config.top_p < 1 or bool(config.min_p)
    if not truncates and capabilities.sampling_mask:
        return ["it runs with --return-sampling-mask, which needs top_k: start it without, or set top_k"]
    if truncates and not (capabilities.sampling_mask and capabilities.has_generate_route):
        warnings.warn(
            f"top_k={config.top_k}, top_p={config.top_p}, min_p={config.min_p}: the server does not return the candidate "
            "sets that it samples from, so the trainer normalises over the whole vocabulary and the importance ratio is "
            "biased (too small). vLLM 0.28 or later returns them on a GPU: start it with --return-sampling-mask "
            "--enable-scale-out (and VLLM_USE_V2_MODEL_RUNNER=1 if it refuses the flag), or set top_k=0, top_p=1, min_p=0",
            stacklevel=2,
        )
    return []
