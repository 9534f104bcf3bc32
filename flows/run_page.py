"""What a flow run's page shows of its run."""

import contextlib
from collections.abc import Iterator

from slipstream.run_folder import RunFolder


@contextlib.contextmanager
def showing(run: RunFolder) -> Iterator[None]:
    """Keep the page of the current flow run up to date from a thread while the body runs."""
    yield
