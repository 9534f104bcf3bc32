"""A training on samples that another one recorded (`record_samples = true`): without a server, and always the same."""

from pathlib import Path
from typing import Any

from slipstream.learner.pipeline import Pipeline, Resumed, starting_point
from slipstream.learner.replay import ReplayPipeline, recorded, recorded_budget
from slipstream.learner.trainer import AsyncGRPOTrainer


class ReplayedTrainer(AsyncGRPOTrainer):
    """`AsyncGRPOTrainer` on a recording; with the recorded training's arguments, model and number of processes it takes
    the same steps. From one of its checkpoints it takes those that followed without an interruption.

    Args:
        recording: a run's `records/a<attempt>/samples.pickle`, or a script's `<output_dir>/samples.pickle`. It is unpickled:
            use only what you recorded yourself.
    """

    def __init__(self, *args: Any, recording: str | Path, **kwargs: Any) -> None:
        self._recording = Path(recording)
        self._token_budget = recorded_budget(self._recording)
        super().__init__(*args, **kwargs)

    def make_pipeline(self, end: int | None, resumed: Resumed | None) -> Pipeline:
        position, remainder = starting_point(resumed)
        held = {sample.number for sample in remainder}
        groups = [g for g in recorded(self._recording) if not position.is_settled(g.number) and g.number not in held]
        return ReplayPipeline(self, groups, self.args.token_budget or self._token_budget, resumed)
