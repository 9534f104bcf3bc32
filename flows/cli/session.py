"""Runs a flow for the command line: Prefect's API, interrupts, progress, and how each ending is told."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flows.cli.progress import progress
from flows.cli.summary import summary
from flows.prefect_api import prefect_api
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from tasks.interrupt import stopping
from tasks.outcome import RunCancelled
from tasks.stop import request_cancel

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


@contextmanager
def stop_once(run: RunFolder) -> Iterator[None]:
    """The first INT, TERM or HUP stops the run, on storage and by KeyboardInterrupt; the others change nothing."""

    def ask(name: str) -> None:
        if run.run_file.exists():
            request_cancel(run, "command line", name)

    with stopping("the run", ask):
        yield


def run_train(config: RunConfig, run_id: str, again: Sequence[str]) -> int:
    """Run the training flow; the exit code."""
    run = RunFolder(Path(config.storage.root).expanduser() / run_id)

    def body() -> None:
        from flows.train import train

        train(config, run_id)

    return _session(run, body, again)


def run_resume(run: RunFolder, again: Sequence[str]) -> int:
    """Run the resume flow; the exit code."""

    def body() -> None:
        from flows.train import resume

        resume(str(run.path))

    return _session(run, body, again)


def _what_is_left(run: RunFolder) -> str:
    if not run.attempts():
        return "nothing had been started yet"
    return f"no job is left. Continue with: slipstream resume {run.path}"


def _session(run: RunFolder, body: Callable[[], None], again: Sequence[str]) -> int:
    try:
        with stop_once(run):
            print("starting Prefect", flush=True)
            with prefect_api(run.path.parent / ".prefect", run.run_id):
                from flows.cli.logs import prefect_logs_to

                prefect_logs_to(run.logs / "flow.log")
                print(f"run folder: {run.path}", flush=True)
                with progress(run):
                    body()
    except (KeyboardInterrupt, RunCancelled) as error:
        reason = f": {error.reason}" if isinstance(error, RunCancelled) else ""
        print(f"stopped{reason}; {_what_is_left(run)}", file=sys.stderr)
        return INTERRUPTED
    except BaseException as error:
        if type(error).__name__ != "TerminationSignal":  # Prefect's, raised on TERM inside a flow
            raise
        print(f"terminated; {_what_is_left(run)}", file=sys.stderr)
        return 128 + signal.SIGTERM
    print()
    print(summary(run, again))
    return 0
