"""A Prefect worker whose end is nobody else's: `python -m flows.up.worker POOL`.

Prefect's own process worker ends the flow processes that it started when it ends itself, by a signal or because the API was
away for some minutes. Ours leaves them to themselves: a flow process leads its run without a worker.
"""

import asyncio
import os
import signal
import socket
import sys
import warnings
from typing import Any


def _leave(number: int, _frame: Any) -> None:
    os._exit(0 if number in (signal.SIGTERM, signal.SIGINT) else 128 + number)


def worker_class() -> Any:
    """Prefect's process worker, without the clean-up of its children."""
    from prefect.workers.process import ProcessWorker

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it takes the place of the one that it derives from

        class LeavingWorker(ProcessWorker):
            """Ends at once, whatever ends it, and touches no flow process."""

            async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> None:
                if error is not None:
                    self._logger.error("the worker ends; its flow runs go on", exc_info=(kind, error, traceback))
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1 if error is not None else 0)

    return LeavingWorker


def main() -> None:
    """Poll the pool that the first argument names until a signal; the environment says which Prefect server."""
    (pool,) = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    worker = worker_class()(
        name=f"{socket.gethostname()}-{os.getpid()}",
        work_pool_name=pool,
        create_pool_if_not_found=False,
    )
    asyncio.run(worker.start(printer=lambda text: print(text, flush=True)))


if __name__ == "__main__":
    main()
