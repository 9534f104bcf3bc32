"""`train CONFIG --run-id ID` and `resume RUN` with the doubles and without Prefect: what leads a cell of a sweep in tests."""

import argparse
import sys
from pathlib import Path

from slipstream.config_file import load_config
from slipstream.run_folder import RunFolder
from tests.doubles.cli import install


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "resume"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--run-id")
    arguments = parser.parse_args()
    install()
    from flows.cli.session import stop_once
    from tasks.finish import supervise_to_the_end
    from tasks.outcome import RunCancelled, RunFailed
    from tasks.prepare import prepare, resume_prepare

    if arguments.what == "train":
        config = load_config(arguments.path)
        if config.model.name == "refused":
            print("error: model.name: there is no such model", file=sys.stderr)
            return 2
        run = RunFolder(Path(config.storage.root) / arguments.run_id)
    else:
        run = RunFolder(arguments.path)
    with stop_once(run):
        try:
            if arguments.what == "train":
                prepare(config, arguments.run_id)
            else:
                resume_prepare(run.path)
            supervise_to_the_end(run)
        except RunFailed as error:
            print(error)
            return 1
        except RunCancelled:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
