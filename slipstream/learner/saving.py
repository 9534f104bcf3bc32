"""Checkpoints of a trainer: whole, with `rollout_state.json` and a seal, or not there at all."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.learner import checkpoint as ckpt
from slipstream.learner.pipeline import Pipeline
from slipstream.learner.reporter import Reporter
from slipstream.learner.room import check_final_room, check_room, estimated_bytes, written_bytes
from slipstream.learner.sync import PolicySync
from slipstream.metrics.window import Window
from slipstream.run_folder import RunFolder, read_json, write_json

WINDOW_FILE = "metrics_window.json"  # of a checkpoint


def read_window(checkpoint: Path) -> dict[str, Any]:
    """State of the window that was open when a checkpoint was written, empty without one."""
    return read_json(checkpoint / WINDOW_FILE) or {}


class Saving:
    """The saving half of `AsyncGRPOTrainer`; transformers' `Trainer` comes after it among the bases."""

    args: Any
    state: Any
    accelerator: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    reporter: Reporter
    _window: Window
    _pipeline: Pipeline | None
    _sync: PolicySync
    _saved_step = -1
    _saved_bytes = 0

    if TYPE_CHECKING:

        @property
        def num_prompts(self) -> int | None: ...
        @property
        def data_fingerprint(self) -> str: ...
        @property
        def _order(self) -> tuple[bool, int]: ...
        @property
        def _is_main(self) -> bool: ...
        def _get_output_dir(self, trial: Any) -> str: ...
        def _merged_window(self) -> Window: ...

    def _read_state(self, path: Path) -> tuple[ckpt.RolloutState, Path]:
        if self._is_main:
            ckpt.verify(path)
            self._saved_bytes = written_bytes(path)
        state = ckpt.RolloutState.read(path)
        shuffle, seed = self._order
        state.check_same_data(self.data_fingerprint, self.num_prompts, shuffle, seed)
        return state, path

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint that is complete, with its marker last, or not there at all. Raises NotWritten."""
        if self._saved_step == self.state.global_step:
            return
        begun = time.monotonic()
        path = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        self.reporter.phase("saving", step=self.state.global_step)
        if self._is_main:
            if path.exists():
                shutil.rmtree(path)
            expected = self._saved_bytes or estimated_bytes(self.model, self.optimizer)
            check_room(path.parent, expected, self.state.global_step)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # nothing older goes before this is sealed
        try:
            with self._whole(path, f"the checkpoint of step {self.state.global_step}", "the one before it"):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                self.accelerator.wait_for_everyone()
                window = self._merged_window()
                if self._pipeline is not None:
                    write_json(path / WINDOW_FILE, window.state())
                    self._pipeline.write_state(path, self.state.global_step, self._sync.version)
                    self.reporter.sync()
                    ckpt.seal(path)
                    self._saved_bytes = written_bytes(path)
                    self._rotate(path.parent, limit)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        self._saved_step = self.state.global_step
        self._window.add("perf/save_s", time.monotonic() - begun)

    def save_final(self, folder: Path) -> None:
        """Write the trained model to `folder`, whole or not at all. Raises NotWritten."""
        if self._is_main:
            check_final_room(folder.parent, self.model)
        self.accelerator.wait_for_everyone()
        with self._whole(folder, "the trained model", "the last checkpoint"):
            self.save_model(str(folder))  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _whole(self, path: Path, what: str, kept: str) -> Iterator[None]:
        """What is cut short goes away. Raises NotWritten for what the storage did."""
        try:
            yield
        except Exception as error:
            if not ckpt.is_write_failure(error):
                raise
            if self._is_main:
                shutil.rmtree(path, ignore_errors=True)
            raise ckpt.NotWritten(
                f"{what} could not be written to {path}: {error}; {kept} is untouched: make room, then resume"
            ) from error

    def _rotate(self, output_dir: Path, keep: int | None) -> None:
        run = RunFolder(self.args.run_dir) if self.args.run_dir else None
        if run is not None and output_dir.resolve() == run.output(self.args.attempt).resolve():
            ckpt.rotate_attempts(run, self.args.attempt, keep)
        else:
            ckpt.rotate(output_dir, keep)

    def _save_last(self) -> None:
        """The end of the data comes unannounced: save the last step where the schedule did not."""
        if self.args.save_strategy != "no" and self.state.global_step not in (0, self._saved_step):
            self._save_checkpoint(self.model_wrapped, None)
