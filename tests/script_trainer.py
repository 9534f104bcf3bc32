"""A trainer of a few lines for scripts: its constructor and its rollout process are the real one's."""

from typing import Any

from slipstream.rollout.main_module import stop_here_in_rollout_process
from slipstream.rollout.setup import LoopSetup
from slipstream.rollout.worker import RolloutWorker
from tests.tiny_loops import Describes


class ScriptTrainer:
    def __init__(self, reward_funcs: list[Any]) -> None:
        stop_here_in_rollout_process()
        self.reward_funcs = reward_funcs

    def train(self) -> Any:
        """What the rewards answered in the rollout process."""
        worker = RolloutWorker(Describes, {"reward_funcs": self.reward_funcs}, LoopSetup("r", 1, "m", True, 64), 60.0)
        worker.start()
        try:
            while worker.rollouts.empty():
                worker.check()
            return worker.rollouts.get()["rewards"]
        finally:
            worker.stop()
