"""A replayed training of a run's attempt that reports to an integration: RUN_DIR ATTEMPT NAME [CHECKPOINT]"""

import os
import sys

from slipstream.learner.reporter import Reporter
from slipstream.run_folder import RunFolder
from slipstream.tracking import PROJECT, environment_of


def main(folder: str, attempt: str, name: str, checkpoint: str | None = None) -> None:
    run = RunFolder(folder)
    os.environ.update(environment_of(run.trackers, run.run_id))
    from tests.learner_replay import ReplayTrainer, made_up_group, replay_config, tiny_model

    config = replay_config(
        run.output(int(attempt)),
        report_to=[name],
        run_name=run.run_id,
        **({"project": PROJECT} if name == "trackio" else {}),
        logging_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    groups = [made_up_group(number, 3, 5, 9) for number in range(9)]
    trainer = ReplayTrainer(tiny_model(), config, groups, 40)
    trainer.reporter = Reporter(run, int(attempt))
    trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
