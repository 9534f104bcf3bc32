"""The cluster that a profile names."""

from cluster.backend import Backend
from cluster.profile import ClusterProfile


def backend_of(profile: ClusterProfile, poll_s: float | None = None) -> Backend:
    """`poll_s`: seconds between two questions to a scheduler (`recovery.poll`); None: the default."""
    if profile.executor == "slurm":
        from cluster.slurm_backend import POLL_S, SlurmBackend

        return SlurmBackend(profile, POLL_S if poll_s is None else poll_s)
    from cluster.local_backend import LocalBackend

    return LocalBackend(profile)
