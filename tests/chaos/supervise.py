"""One supervisor of a chaos run, on the login machine: `python -m tests.chaos.supervise CONFIG RUN_ID`.

Makes the run where there is none; else leads it, or looks on until its leader falls silent. With `--real` the leaders are
the real ones, else the doubles.
"""

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any

from slipstream.config_file import load_config
from slipstream.run_folder import RunFolder
from tests.doubles.cli import install
from tests.doubles.events import event, identify


def hook_records() -> None:
    """An event between each submission and its record."""
    import cluster.jobs

    record = cluster.jobs.record_job

    def told(run: RunFolder, job: Any) -> None:
        event(run, "supervisor.record", role=job.role)
        record(run, job)

    for module in list(sys.modules.values()):
        if getattr(module, "record_job", None) is record:
            module.record_job = told  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("run_id")
    parser.add_argument("--real", action="store_true")
    arguments = parser.parse_args()
    if not arguments.real:
        install()
    import cluster.backends  # noqa: F401
    from tasks.lease import release
    from tasks.outcome import NothingToResume
    from tasks.prepare import prepare
    from tasks.supervise import supervise

    hook_records()
    identify(who="supervisor", attempt=0)
    config = load_config(arguments.config)
    run = RunFolder(Path(config.storage.root) / arguments.run_id)
    if not run.run_file.exists():
        prepare(config, arguments.run_id)
    try:
        outcome = supervise(run)
        print(outcome)
        return 0
    except NothingToResume as error:
        print(error)
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        release(run)


if __name__ == "__main__":
    sys.exit(main())
