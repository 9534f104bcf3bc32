"""A server that is replaced while the run goes on: every rank takes part in delivering the weights to the next one."""

import time
from typing import Any

from slipstream.learner.handover import Handover
from slipstream.learner.pipeline import Pipeline
from slipstream.learner.reporter import Reporter
from slipstream.learner.sync import PolicySync
from slipstream.metrics.window import Window


class Delivering:
    """The delivering half of `AsyncGRPOTrainer`; transformers' `Trainer` comes after it among the bases."""

    state: Any
    accelerator: Any
    model_wrapped: Any
    reporter: Reporter
    _pipeline: Pipeline | None
    _sync: PolicySync
    _handover: Handover
    _window: Window
    _server_absent = False

    def _deliver(self) -> None:
        """All ranks: the weights as they are, under the version that they have."""
        self._sync.deliver(self.accelerator.unwrap_model(self.model_wrapped))

    def _deliver_next_version(self) -> None:
        """All ranks: the optimizer has made a new policy."""
        begun = time.monotonic()
        if self.accelerator.num_processes > 1:
            self.accelerator.wait_for_everyone()
        waited = time.monotonic() - begun
        self.reporter.phase("delivering weights", step=self.state.global_step)
        times = self._sync.advance(self.accelerator.unwrap_model(self.model_wrapped))
        if self._pipeline is not None:
            self._pipeline.set_version(self._sync.version)
        if times is not None:
            add = self._window.add
            add("perf/weight_sync_s", time.monotonic() - begun)
            add("perf/weight_sync_pause_s", times.pause_s)
            add("perf/weight_sync_barrier_s", waited)
            add("perf/weight_sync_transfer_s", times.transfer_s)

    def _tend_server(self, doing: str) -> None:
        """On rank 0, while the others wait for its word: where another server has come, all deliver to it.

        `doing`: the phase that goes on afterwards.
        """
        assert self._pipeline is not None
        step = self.state.global_step
        if self._pipeline.server_moved():
            self.reporter.phase("delivering weights", step=step)
            self._handover.call_for_delivery()
            self._deliver()
            self._server_absent = False
            self.reporter.phase(doing, step=step)
        elif self._pipeline.server_absent() != self._server_absent:
            self._server_absent = not self._server_absent
            self.reporter.phase("waiting for the server" if self._server_absent else doing, step=step)
