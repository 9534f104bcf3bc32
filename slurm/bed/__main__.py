"""`python -m slurm.bed` is `slurm/testbed`."""

import sys

from slurm.bed.cli import main

sys.exit(main())
