"""Rank 0's half of the pipeline: the server's connection, the rollout process, the feed and the ledger."""

import logging
import os
import queue
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.data import fingerprint
from slipstream.learner import checkpoint as ckpt
from slipstream.learner.feed import Inbox, SampleFeed
from slipstream.learner.ledger import Ledger
from slipstream.learner.sync import PolicySync, wire_dtype
from slipstream.process import new_incarnation
from slipstream.rollout.setup import LoopSetup, Position
from slipstream.rollout.types import GroupResult
from slipstream.rollout.worker import RolloutWorker
from slipstream.run_folder import RunFolder
from slipstream.serving.control import ServerControl
from slipstream.serving.probe import check, probe
from slipstream.serving.transport import make_transport

if TYPE_CHECKING:
    from slipstream.learner.trainer import AsyncGRPOTrainer

logger = logging.getLogger(__name__)


class ServerNotUsable(RuntimeError):
    """The server lacks something; the message says with which flag to restart it."""


class Pipeline:
    """Everything that only rank 0 has. Made before the model is prepared, so that processes start side by side."""

    def __init__(
        self, trainer: "AsyncGRPOTrainer", end: int | None, resumed: tuple[ckpt.RolloutState, Path] | None
    ) -> None:
        """`end`: prompt number at which the data ends, or None. Raises ServerNotUsable, ServerError, NotPicklable."""
        config = trainer.args
        self._trainer = trainer
        self._end = end
        self.run_id = RunFolder(config.run_dir).run_id if config.run_dir else f"script-{new_incarnation()}"
        self._control = ServerControl(
            config.vllm_server_base_url, config.vllm_server_token_file, config.vllm_server_timeout
        )
        trainer.reporter.phase("waiting for the server")
        self._control.wait_healthy(config.vllm_server_timeout)
        self.capabilities = probe(self._control)
        head = config.num_sampler_logprobs if config.score_centering else 0
        problems = check(
            self.capabilities,
            num_sampler_logprobs=head,
            max_model_len=config.max_completion_length + 1,
            num_generations=config.num_generations,
        )
        if problems:
            raise ServerNotUsable("the server cannot be used as it runs:\n" + "\n".join(f"- {p}" for p in problems))
        max_model_len = self.capabilities.max_model_len
        if max_model_len is None:
            raise ServerNotUsable("the server does not say its max_model_len in /v1/models")
        self.token_budget = config.token_budget or max_model_len

        state = resumed[0] if resumed else None
        remainder = ckpt.load_samples(resumed[1] / ckpt.REMAINDER_FILE) if resumed else []
        position = state.position if state else Position()
        shuffle, seed = trainer._order
        setup = LoopSetup(
            run_id=self.run_id,
            attempt=config.attempt,
            served_model=self.capabilities.model,
            use_generate_route=self.capabilities.has_generate_route,
            max_model_len=max_model_len,
            # what rank 0 still holds is neither settled nor to be generated again
            position=Position(position.first_unsettled, position.settled_beyond | {s.number for s in remainder}),
            end=end,
            shuffle=shuffle,
            seed=seed,
            eval_dataset=trainer.eval_dataset,
            loop_state=state.loop_state if state else None,
        )
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
            setup,
            config.rollout_worker_timeout,
        )
        self.ledger = Ledger(len(trainer.train_dataset), position, trainer.reporter.ledger)
        self.worker.start()
        self.inbox = Inbox(self.worker, self._group_arrived)
        self.feed = SampleFeed(
            self.inbox,
            self.worker,
            self.ledger,
            trainer._window,
            ranks=trainer.accelerator.num_processes,
            accumulation=config.gradient_accumulation_steps,
            token_budget=self.token_budget,
            max_staleness=config.max_staleness,
            warn=logger.warning,
        )
        self.ledger.restore(remainder)
        self.feed.hold(remainder)
        self._fingerprint = fingerprint(trainer.train_dataset)
        self._state_requests = 0

    def _group_arrived(self, group: GroupResult) -> None:
        trainer = self._trainer
        trainer.reporter.advance()
        if group.table:
            shown = trainer.args.num_completions_to_print
            trainer.reporter.completions(trainer.state.global_step, group.table[:shown])

    def make_sync(self, version: int) -> PolicySync:
        config = self._trainer.args
        transport = make_transport(
            self._control,
            self.capabilities.transfer_backend,  # type: ignore[arg-type]
            config.device,
            self.run_id,
            config.attempt,
            config.vllm_server_timeout,
            bind_host=learner_host(),
        )
        return PolicySync(transport, self.run_id, config.attempt, wire_dtype(self.capabilities.dtype), version)

    def start(self, version: int, step: int) -> None:
        self.worker.version.value = version
        self.ledger.start_at(step)

    def open(self) -> None:
        """The weights are delivered: generation may begin."""
        self.feed.open()

    def drain_metrics(self) -> None:
        """Move what the rollout process has measured into the trainer's window."""
        while True:
            try:
                self._trainer._window.add_all(self.worker.metrics.get_nowait())
            except queue.Empty:
                return

    def write_state(self, path: Path, step: int, version: int) -> None:
        """Write `rollout_state.json`, and the rest of the groups that the checkpoint splits."""
        trainer = self._trainer
        self._state_requests += 1
        self.worker.commands.put(("state", self._state_requests))
        loop_state = self.inbox.answer("state", self._state_requests)
        length = len(trainer.train_dataset)
        position = self.ledger.position
        shuffle, seed = trainer._order
        epoch, prompt = divmod(position.first_unsettled, length)
        ckpt.RolloutState(
            step=step,
            epoch=epoch,
            prompt=prompt,
            settled_beyond=sorted(position.settled_beyond),
            model_version=version,
            attempt=trainer.args.attempt,
            dataset_fingerprint=self._fingerprint,
            dataset_length=length,
            shuffle=shuffle,
            seed=seed,
            rewards=trainer.reward_names,
            loop=f"{trainer.loop_cls.__module__}:{trainer.loop_cls.__qualname__}",
            loop_state=loop_state,
        ).write(path)
        remainder = self.feed.held_of(self.ledger.partly_trained())
        if remainder:
            ckpt.save_samples(path / ckpt.REMAINDER_FILE, remainder)

    def close(self) -> None:
        self.worker.stop()
        self.inbox.close()
        self._control.close()


def learner_host() -> str:
    """The address of this host that the server's nodes can reach, as the cluster layer says it."""
    return os.environ.get("SLIPSTREAM_HOST", "127.0.0.1")
