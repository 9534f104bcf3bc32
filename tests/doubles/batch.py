"""`python -m tasks.batch` with the doubles in place of server and learner, and without the look at model and data."""

import sys

from tests.doubles.cli import install

if __name__ == "__main__":
    install()
    from tasks.batch import main

    sys.exit(main())
