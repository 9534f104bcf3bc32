"""The command line with the doubles in place of server and learner, and without the look at model and data."""

import slipstream.preflight
from cluster import entry
from flows.cli.main import main

LEADERS = {"server": "tests.doubles.server:run", "learner": "tests.doubles.learner:run"}


def install() -> None:
    """Put the doubles in the place of the leaders, in this process."""
    entry.LEADERS.update(LEADERS)
    slipstream.preflight.check = lambda config: []


if __name__ == "__main__":
    install()
    main()
