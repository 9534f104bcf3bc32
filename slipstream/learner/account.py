"""What training has used of the tokens that were generated, and so how far generation may go on."""

import threading
from collections.abc import Callable

from slipstream.rollout.allowance import outstanding_bound


class TokenAccount:
    """The running total that rank 0 publishes. The planning thread gives back what it drops, the training thread what a
    step uses: each change and its publication is one."""

    def __init__(self, publish: Callable[[int], None], max_staleness: int, tokens_per_step: int) -> None:
        """`tokens_per_step`: what a step is taken to use until the first has told."""
        self._publish = publish
        self._max_staleness = max_staleness
        self._lock = threading.Lock()
        self._used = 0
        self._bound = outstanding_bound(max_staleness, tokens_per_step)

    def publish(self) -> None:
        """Let generation go on until all that was used, and what may be outstanding."""
        with self._lock:
            self._publish(self._used + self._bound)

    def dropped(self, tokens: int) -> None:
        """These are not outstanding any more, at once. Negative: they are again, as they were not dropped after all."""
        with self._lock:
            self._used += tokens
            self._publish(self._used + self._bound)

    def used(self, tokens: int) -> None:
        """A step uses these. Not published yet."""
        with self._lock:
            self._used += tokens
            if tokens:
                self._bound = outstanding_bound(self._max_staleness, tokens)
