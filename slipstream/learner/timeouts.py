"""Time-outs of the libraries that the learner uses: longer than the run's own deadlines, and derived from them."""

import math

from slipstream.config_section import LIBRARY_MARGIN_S, MOST_SECONDS
from slipstream.run_config import RunConfig

# of the gloo group over which rank 0 hands steps out: the others wait there for as long as rollouts take
HANDOVER_TIMEOUT_S = MOST_SECONDS


def collective_timeout(config: RunConfig, patience_s: float) -> int:
    """Seconds that a collective of the ranks may take.

    `patience_s`: for which rank 0 waits for a server that has gone, while the others wait for rank 0.
    """
    section = config.learner
    deadlines = section.startup_timeout, section.step_timeout, section.sync_timeout, section.save_timeout
    return _after(*deadlines, patience_s)


def meeting_timeout(config: RunConfig) -> int:
    """Seconds that torchrun's agents wait for each other."""
    return _after(config.learner.startup_timeout)


def _after(*deadlines: float) -> int:
    return min(math.ceil(max(deadlines) + LIBRARY_MARGIN_S), int(MOST_SECONDS))
