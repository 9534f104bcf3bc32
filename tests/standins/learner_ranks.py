"""One rank of torchrun: every case of the loss, a mixture of experts, and resumed trainings; what it did is saved as RANK.pt.

torchrun … -m tests.standins.learner_ranks FOLDER (with a checkpoint of a training of one rank in FOLDER/one)
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.learner_cases import CASES, run_case
from tests.learner_replay import snapshot
from tests.learner_resume import new_trainer
from tests.moe import run_moe


def main(folder: Path) -> None:
    steps = {name: run_case(case, folder / "cases") for name, case in CASES.items()}
    whole = new_trainer(folder / "whole", num_steps=4)
    whole.train()
    resumed = new_trainer(folder / "resumed", num_steps=4, seed=1)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    more = new_trainer(folder / "more", num_steps=4, seed=1)  # from a training of one rank
    more.train(resume_from_checkpoint=str(folder / "one" / "checkpoint-2"))
    moe = {coefficient: run_moe(folder / "moe", coefficient) for coefficient in (0.0, 0.125)}
    result = {
        "moe": {coefficient: trainer.steps for coefficient, trainer in moe.items()},
        "moe_logs": moe[0.125].state.log_history,
        "steps": steps,
        "whole": snapshot(whole.model),
        "resumed": snapshot(resumed.model),
        "whole_run": (whole.steps, whole.reports.lines),
        "more_run": (more.steps, more.reports.lines),
    }
    torch.save(result, folder / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
