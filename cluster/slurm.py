"""The sbatch file of a job, written by submitit. Shown by --dry-run; nothing here talks to SLURM."""

import shlex
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from cluster.profile import ClusterProfile

# All that a job inherits from where it is submitted: sbatch keeps the environment, and there may be secrets in it.
EXPORTED = ("HOME", "LANG", "PATH", "USER")


class SbatchWriter(SlurmExecutor):
    """submitit's SLURM executor on a machine that need not have SLURM."""

    @classmethod
    def affinity(cls) -> int:
        return 2


def job_name(run_id: str, role: str) -> str:
    return f"slipstream-{run_id}-{role}"


def sbatch_parameters(
    profile: ClusterProfile, run_id: str, role: str, attempt: int, nodes: int, gpus: int
) -> dict[str, Any]:
    """submitit's parameters of one job: one task a node, never requeued by SLURM (the supervisor alone restarts)."""
    extra: dict[str, Any] = {
        "no_requeue": True,
        "kill_on_invalid_dep": "yes",
        "export": ",".join(EXPORTED),
    }
    for option in profile.sbatch:
        key, _, value = option.removeprefix("--").partition("=")
        extra[key] = value or True
    parameters: dict[str, Any] = {
        "job_name": job_name(run_id, role),
        "comment": f"slipstream:{run_id}:{attempt}:{role}",
        "time": profile.time_limit,
        "nodes": nodes,
        "ntasks_per_node": 1,
        "stderr_to_stdout": True,
        "dependency": "singleton",
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "cpus_per_task": profile.cpus_per_task,
        "gpus_per_node": gpus or None,
        "mem": f"{int(profile.memory_gb * 1024)}MB" if profile.memory_gb else None,
        "setup": [*profile.setup, *_interface_lines(profile)] or None,
        "srun_args": ["--export=ALL"],
        "additional_parameters": extra,
    }
    return {key: value for key, value in parameters.items() if value is not None}


def _interface_lines(profile: ClusterProfile) -> list[str]:
    if profile.host_interface is None:
        return []
    name = shlex.quote(profile.host_interface)
    return [f"export NCCL_SOCKET_IFNAME={name} GLOO_SOCKET_IFNAME={name}"]


def sbatch_text(folder: Path, parameters: dict[str, Any], python: str) -> str:
    """The batch file that submitit would hand to sbatch, its own logs and pickles under `folder`."""
    writer = SbatchWriter(folder, python=shlex.quote(python))
    writer.update_parameters(**parameters)
    return writer._make_submission_file_text(writer._submitit_command_str, "")
