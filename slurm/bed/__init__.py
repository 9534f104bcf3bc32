"""A private SLURM cluster on one machine, for tests: see docs/testbed.md.

Every node, the controller and a login machine are namespaces of their own (process ids, network, mounts, host name),
so that a power cut or a cut cable can be had for one of them. Standard library only; needs root.
"""

from slurm.bed.bed import Bed
from slurm.bed.description import BedError, Description, default_folder
from slurm.bed.packages import install, unusable

__all__ = ["Bed", "BedError", "Description", "default_folder", "install", "unusable"]
