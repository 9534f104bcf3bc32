"""The sbatch file of a job, written by submitit, and its submission."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from submitit.slurm.slurm import SlurmExecutor

from cluster.clients import call
from cluster.entry import entry_command
from cluster.environment import ROOT, code_root
from cluster.jobs import JOB_MARK
from cluster.node import INTERFACE_ENV
from cluster.profile import ClusterError, ClusterProfile
from slipstream.instance import instance_of
from slipstream.process import INCARNATION_ENV
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, write_atomic

PATHS = ("/usr/local/bin", "/usr/bin", "/bin")


@dataclass(frozen=True)
class Shape:
    nodes: int
    gpus: int  # of each node


def shape_of(config: RunConfig, role: str) -> Shape:
    """Nodes of a job of `role`, and GPUs of each; in one allocation every node has what the larger role needs."""
    server = Shape(0 if config.server.url else config.server.nodes, 0 if config.server.url else config.server.gpus)
    learner = Shape(config.learner.nodes, config.learner.gpus)
    if role == "allocation":
        return Shape(learner.nodes + server.nodes, max(learner.gpus, server.gpus))
    return server if role == "server" else learner


def job_name(run_id: str, role: str) -> str:
    return f"slipstream-{run_id}-{role}"


class Comment(NamedTuple):
    """What a job's comment says. `instance` is "" in one of before there were instances."""

    instance: str
    run_id: str
    attempt: int
    role: str
    incarnation: str


def job_comment(instance: str, run_id: str, attempt: int, role: str, incarnation: str) -> str:
    whose = f"{instance}:" if instance else ""
    return f"slipstream:{whose}{run_id}:{attempt}:{role}:{incarnation}"


def parse_comment(comment: str) -> Comment | None:
    """What a comment that `job_comment` made says; None for any other."""
    parts = comment.split(":")
    if len(parts) == 5:
        parts.insert(1, "")
    if len(parts) != 6 or parts[0] != "slipstream" or not parts[3].isdigit():
        return None
    return Comment(parts[1], parts[2], int(parts[3]), parts[4], parts[5])


def is_anothers(comment: str, instance: str) -> bool:
    """Whether a job's comment names another instance than `instance`. One that names none may be of any."""
    found = parse_comment(comment)
    return found is not None and bool(found.instance and instance) and found.instance != instance


def sbatch_parameters(
    profile: ClusterProfile,
    run: RunFolder,
    role: str,
    attempt: int,
    incarnation: str,
    config: RunConfig,
    cwd: Path,
    exclude: Sequence[str] = (),
) -> dict[str, Any]:
    """submitit's parameters of one job: one task a node, never requeued by SLURM (the supervisor alone restarts)."""
    shape = shape_of(config, role)
    extra: dict[str, Any] = {
        "chdir": str(cwd),
        # sbatch would store the submitter's whole environment with the job, secrets included
        "export": "NONE",
        "kill_on_invalid_dep": "yes",
        "no_requeue": True,
        "reservation": profile.reservation,
    }
    for option in profile.sbatch:
        key, _, value = option.removeprefix("--").partition("=")
        if key == "exclude":  # besides the nodes at fault
            exclude = [value, *exclude]
            continue
        extra[key] = value or True
    parameters: dict[str, Any] = {
        "job_name": job_name(run.run_id, role),
        "comment": job_comment(instance_of(run), run.run_id, attempt, role, incarnation),
        "time": profile.time_limit,
        "signal_delay_s": profile.signal_lead,
        "nodes": shape.nodes,
        "ntasks_per_node": 1,
        "stderr_to_stdout": True,
        "dependency": "singleton",
        "partition": profile.partition,
        "account": profile.account,
        "qos": profile.qos,
        "constraint": profile.constraint,
        "cpus_per_task": profile.cpus_per_task,
        "gpus_per_node": shape.gpus or None,
        "mem": f"{int(profile.memory_gb * 1024)}MB" if profile.memory_gb else None,
        "exclusive": profile.exclusive or None,
        "exclude": ",".join(exclude) or None,
        "setup": _setup(profile, run, role, attempt, incarnation),
        "srun_args": ["--export=ALL", "--kill-on-bad-exit=1"],
        "additional_parameters": {key: value for key, value in extra.items() if value is not None},
    }
    return {key: value for key, value in parameters.items() if value is not None} | {"wckey": None}


def _setup(profile: ClusterProfile, run: RunFolder, role: str, attempt: int, incarnation: str) -> list[str]:
    """Lines of the batch script before its srun. Nothing in them is secret: SLURM stores them and shows them."""
    clients = shutil.which("srun")
    folders = [*PATHS] + ([str(Path(clients).parent)] if clients and str(Path(clients).parent) not in PATHS else [])
    lines = [
        "umask 077",
        # --export=NONE leaves the user's login environment on some clusters, on others nothing but SLURM_*; then bash has
        # a PATH of its own, which is not exported and may name the current folder.
        '[[ "$(declare -p PATH)" == "declare -x "* ]] || PATH=',
        f'export PATH="${{PATH:+$PATH:}}{":".join(folders)}"',
        "export HOME=${HOME:-~}",
        'export USER="${USER:-$(id -un)}" LANG="${LANG:-C.UTF-8}"',
    ]
    if profile.setup:
        lines += ["set -e", *profile.setup, "set +e"]
    if code := code_root():
        lines.append(f'export PYTHONPATH={shlex.quote(code)}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    facts = {
        JOB_MARK: f"{run.run_id}/a{attempt}/{role}/{incarnation}",
        INCARNATION_ENV: incarnation,
        "SLIPSTREAM_PORTS": profile.port_range,
        "SLIPSTREAM_VLLM_PYTHON": profile.vllm_python,
    }
    if profile.host_interface:
        facts |= dict.fromkeys((INTERFACE_ENV, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), profile.host_interface)
    lines += [f"export {name}={shlex.quote(value)}" for name, value in facts.items() if value]
    if profile.scratch:
        lines.append(f'export TMPDIR="{profile.scratch}"')
    return lines


def job_command(
    profile: ClusterProfile, run: RunFolder, role: str, attempt: int, incarnation: str, config: RunConfig
) -> str:
    """What srun runs once on each node, as a shell command."""
    python = profile.python or sys.executable
    words = entry_command(python, run, role, attempt, incarnation, config.learner.nodes)
    return in_container(profile, run.path.parent, words)


def in_container(profile: ClusterProfile, storage: Path, words: Sequence[str]) -> str:
    """A shell command that runs `words` in the profile's container, where it has one; `storage` is mounted there."""
    if not profile.container:
        return shlex.join(words)
    mounts = ",".join(dict.fromkeys([*profile.mounts, *_scratch_mount(profile.scratch), str(storage), str(ROOT)]))
    container = list(profile.container)
    if "{command}" not in container:
        container.append("{command}")
    at = container.index("{command}")
    container[at : at + 1] = words
    return shlex.join(word.replace("{mounts}", mounts) for word in container)


def _scratch_mount(scratch: str | None) -> list[str]:
    """The folder of `scratch` that each node has: what stands before the first variable, which only the node knows."""
    fixed = (scratch or "").partition("$")[0]
    folder = fixed if fixed == scratch else fixed.rpartition("/")[0]
    return [folder.rstrip("/")] if folder.strip("/") else []


def step_script(
    profile: ClusterProfile, run: RunFolder, attempt: int, incarnation: str, config: RunConfig, log: Path
) -> str:
    """A shell script for inside an allocation: one task on each of its nodes, the role by the node's index.

    `log`: of each task, as srun's --output has it.
    """
    srun = ["srun", "--export=ALL", "--kill-on-bad-exit=1", "--ntasks-per-node=1", "--open-mode=append"]
    options = [
        '--nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"',
        # since SLURM 22.05 a step does not take the job's CPUs a task over
        '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}',
        job_command(profile, run, "allocation", attempt, incarnation, config),
    ]
    setup = _setup(profile, run, "allocation", attempt, incarnation)
    return "\n".join(
        ["#!/bin/bash", *setup, "exec " + " ".join([shlex.join([*srun, f"--output={log}"]), *options]), ""]
    )


class EntryExecutor(SlurmExecutor):
    """submitit's SLURM executor for a plain command, also on a machine without SLURM (to show the batch file).

    submitit's own submission waits for sbatch without end and hands it everybody's settings (SBATCH_…).
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        super().__init__(folder)
        self._timeout_s = timeout_s

    @classmethod
    def affinity(cls) -> int:
        return 2

    @classmethod
    def name(cls) -> str:
        return "slurm"

    def text(self, command: str) -> str:
        return self._make_submission_file_text(command, "")

    def submit_command(self, command: str, name: str) -> str:
        """Hand a batch file to sbatch; the job's id. Raises ClusterError, ClusterAway, OSError."""
        folder = Path(self.folder)
        file = folder / f"{name}.sh"
        write_atomic(file, self.text(command))
        output = call(self._make_submission_command(file), self._timeout_s)
        try:
            return str(self._get_job_id_from_submission_command(output))
        except Exception as error:
            raise ClusterError(f"sbatch said something unexpected: {output.strip() or 'nothing'}") from error


def sbatch_text(
    profile: ClusterProfile,
    run: RunFolder,
    role: str,
    attempt: int,
    incarnation: str,
    config: RunConfig,
    cwd: Path,
    folder: Path,
) -> str:
    """The batch file of a job, its logs under `folder`."""
    executor = EntryExecutor(folder, 0)
    executor.update_parameters(**sbatch_parameters(profile, run, role, attempt, incarnation, config, cwd))
    return executor.text(job_command(profile, run, role, attempt, incarnation, config))


# Where models and data are, how libraries behave on this site: nothing that is a secret by its name. More by
# `keep_environment` of the profile.
ALWAYS_KEPT = (
    "CURL_CA_BUNDLE",
    "HF_DATASETS_CACHE",
    "HF_DATASETS_OFFLINE",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONPATH",
    "REQUESTS_CA_BUNDLE",
    "SLIPSTREAM_VLLM_PYTHON",
    "SSL_CERT_FILE",
    "TRANSFORMERS_OFFLINE",
    "WANDB_MODE",
    "XDG_CACHE_HOME",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)


def exported(environment: Mapping[str, str], keep: Sequence[str]) -> dict[str, str]:
    """The variables of the submitter that its jobs get."""
    names = {*ALWAYS_KEPT, *keep}
    return {name: value for name, value in environment.items() if name in names}
