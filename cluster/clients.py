"""Calls of SLURM's clients: bounded in time, in an environment where nobody's settings change what they print."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from cluster.environment import job_environment
from cluster.profile import ClusterError
from slipstream.process import die_with_parent

TIMEOUT_S = 60.0

# SBATCH_EXPORT would override a script's own --export, SQUEUE_FORMAT what squeue prints, SLURM_JOB_ID which job is meant.
_OTHERS = re.compile(r"^(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SACCT|SCANCEL|SCONTROL)_")
_KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER"})
# The request may have arrived all the same, so nothing follows from such a failure.
_AWAY = re.compile(
    r"timed out|time out|unable to contact|send/recv|communication|connection|zero bytes|try again|no route|not respond",
    re.IGNORECASE,
)


class ClusterAway(ClusterError):
    """The scheduler does not answer (or its client hangs). It may answer later, and it may have done what was asked."""


def client_environment(environment: Mapping[str, str]) -> dict[str, str]:
    plain = {k: v for k, v in environment.items() if k in _KEPT or not _OTHERS.match(k)}
    return job_environment(plain, keep=_KEPT) | {"LC_ALL": "C"}


def call(argv: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """What a client prints. Raises ClusterAway where it hangs or cannot reach the scheduler, ClusterError with its words
    where it fails otherwise or is not installed."""
    if shutil.which(argv[0]) is None:
        raise ClusterError(
            f"there is no `{argv[0]}` on this machine: start the run where SLURM's clients are, put them on PATH, or use "
            'cluster.profile = "local"'
        )
    parent = os.getpid()
    try:
        done = subprocess.run(
            list(argv),
            env=client_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            preexec_fn=lambda: die_with_parent(parent),  # so that no submission outlives the one who would record it
        )
    except subprocess.TimeoutExpired:
        raise ClusterAway(f"`{argv[0]}` did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise ClusterAway(f"`{argv[0]}` could not be started: {error}") from None
    if done.returncode == 0:
        return done.stdout
    words = " ".join((done.stderr.strip() or done.stdout.strip()).split()) or f"exit code {done.returncode}"
    raise (ClusterAway if _AWAY.search(words) else ClusterError)(f"`{argv[0]}` failed: {words}")
