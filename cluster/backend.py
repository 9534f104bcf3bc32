"""What a cluster must be able to do for a run; `local` and `slurm` are twins behind this."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster.jobs import JobRecord, JobView
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder

KILL_AFTER_S = 5.0


def roles_of(config: RunConfig) -> tuple[str, ...]:
    """The jobs of a run."""
    if config.server.url:
        return ("learner",)
    return ("allocation",) if config.cluster.shape == "one_allocation" else ("server", "learner")


@dataclass(frozen=True)
class JobRequest:
    """One job to submit.

    Attributes:
        role: "server", "learner", or "allocation" (both in one job).
        incarnation: id of this start; the supervisor has named it in the assignment before it submits.
        cwd: folder that the job starts in; relative paths of the configuration are relative to it.
        why: in plain words, for the record.
        exclude: nodes that it must not run on.
    """

    role: str
    attempt: int
    incarnation: str
    config: RunConfig
    cwd: Path
    why: str
    exclude: tuple[str, ...] = ()


class Backend(Protocol):
    """Calls that reach a scheduler are bounded in time."""

    def check_values(self, config: RunConfig) -> None:
        """The part of `check` that needs no cluster. Raises ClusterError."""
        ...

    def check(self, config: RunConfig) -> None:
        """Raises ClusterError where this cluster cannot run `config`. Allocates nothing."""

    def submit(self, run: RunFolder, request: JobRequest) -> JobRecord:
        """Intent on storage, submission, record on storage.

        Raises ClusterError with the scheduler's words, and its kind ClusterAway where the scheduler does not answer: the
        job may have been submitted all the same, which `adopt` finds out.
        """

    def describe(self, run: RunFolder, role: str, attempt: int, config: RunConfig, cwd: Path) -> str:
        """What `submit` would hand over: the sbatch file, or the command. Writes nothing, needs no scheduler."""

    def look(self, run: RunFolder, jobs: Sequence[JobRecord]) -> dict[str, JobView]:
        """The state of each job, by incarnation. A scheduler that does not answer is UNKNOWN, never an error."""

    def adopt(self, run: RunFolder) -> list[JobRecord]:
        """Jobs of which only the intent is on storage, found by name and comment (or mark), and now recorded.

        An intent whose job the scheduler certainly does not have is marked void. Raises ClusterError where the scheduler
        does not answer.
        """

    def cancel(self, run: RunFolder, jobs: Sequence[JobRecord], kill_after_s: float = KILL_AFTER_S) -> list[JobRecord]:
        """TERM all of them at once, KILL what is left after `kill_after_s`, and wait (bounded) until they have ended.

        Idempotent. Returns those that were alive.
        """
