"""Cluster profiles: what a cluster needs to know about us and we about it, one TOML file a cluster."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PROFILES = Path(__file__).resolve().parent.parent / "slurm" / "profiles"

Word = Annotated[str, Field(pattern=r"^[^\s\"'$`;&|<>\\]+$")]

SLURM_ONLY = (
    "partition", "account", "qos", "reservation", "constraint", "exclusive", "cpus_per_task", "memory_gb", "sbatch",
    "host_interface", "port_range", "scratch", "shared", "python", "container", "mounts",
)  # fmt: skip
# Options that make a job findable, its environment clean and its supervisor the only one who restarts it.
OURS = frozenset({
    "--job-name", "--comment", "--export", "--export-file", "--get-user-env", "--requeue", "--no-requeue", "--dependency",
    "--signal", "--output", "--error", "--open-mode", "--nodes", "--ntasks", "--ntasks-per-node", "--array", "--wrap",
    "--parsable", "--chdir", "--test-only", "--wait", "--time", "--hold",
})  # fmt: skip


class ClusterError(Exception):
    """A profile cannot be read, or the cluster refuses or cannot do what was asked."""


class ClusterProfile(BaseModel):
    """Where and how jobs are submitted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    executor: Literal["local", "slurm"] = Field(title="Executor", description="submitit's executor.")
    partition: Word | None = Field(None, title="Partition", description="SLURM partition; empty: the default.")
    account: Word | None = Field(None, title="Account", description="SLURM account.")
    qos: Word | None = Field(None, title="QoS", description="SLURM quality of service.")
    reservation: Word | None = Field(None, title="Reservation", description="SLURM reservation.")
    constraint: Word | None = Field(None, title="Constraint", description="Node features that SLURM must find.")
    time_limit: int = Field(1440, title="Time limit", ge=1, description="Minutes after which SLURM ends a job.")
    signal_lead: int = Field(
        180,
        title="Signal lead",
        ge=1,
        description="Seconds before the time limit at which a job is told to save and leave: at least two of the longest "
        "steps, a checkpoint, and the minute by which SLURM may be early. At most half the time limit.",
    )
    exclusive: bool = Field(False, title="Exclusive", description="Nodes are not shared with other jobs.")
    cpus_per_task: int | None = Field(None, title="CPUs", ge=1, description="CPU cores of a node's task.")
    memory_gb: float | None = Field(None, title="Memory", gt=0, description="GiB of memory of a node.")
    host_interface: Word | None = Field(
        None,
        title="Network interface",
        description="Interface on which nodes reach each other, for servers, stores, NCCL and gloo; empty: that of the "
        "node's name, and the libraries choose.",
    )
    port_range: Annotated[str, Field(pattern=r"^[0-9]{1,5}-[0-9]{1,5}$")] | None = Field(
        None, title="Ports", description="Ports that jobs may listen on, like 20000-20999; empty: any free port."
    )
    shared: Annotated[str, Field(pattern=r"^/")] | None = Field(
        None, title="Shared storage", description="Folder that every node sees; storage.root must lie in it."
    )
    scratch: Annotated[str, Field(pattern=r"^/[\w/.${}-]+$")] | None = Field(
        None, title="Scratch", description="A node's own folder for temporary files, like /scratch/$SLURM_JOB_ID."
    )
    python: str | None = Field(
        None, title="Interpreter", description="Python of the jobs' leaders on the nodes; empty: this one."
    )
    vllm_python: str | None = Field(
        None, title="vLLM's interpreter", description="Python with vLLM on the nodes; empty: .venv-vllm, as here."
    )
    container: tuple[str, ...] = Field(
        (),
        title="Container",
        description="Words that stand before a job's command, like apptainer exec --nv --bind {mounts} IMAGE. "
        "{command}: where the command goes (else at the end). {mounts}: what `mounts` names, "
        "the storage root, this code, and `scratch` up to its first variable.",
    )
    mounts: tuple[str, ...] = Field((), title="Mounts", description="Paths that the container must see besides.")
    setup: tuple[str, ...] = Field(
        (), title="Setup", description="Shell lines that run before a job's command; one that fails ends the job."
    )
    sbatch: tuple[Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=.*)?$")], ...] = Field(
        (), title="sbatch options", description="More options of sbatch, like --mail-type=FAIL."
    )
    keep_environment: tuple[Word, ...] = Field(
        (),
        title="Kept environment",
        description="Variables that jobs get although their names look like secrets; on SLURM, where jobs inherit "
        "nothing, any besides the usual ones.",
    )
    client_timeout: float = Field(
        60.0, title="Client timeout", gt=0, le=3600, description="Seconds until a SLURM client counts as hung."
    )

    @model_validator(mode="after")
    def _possible(self) -> "ClusterProfile":
        if self.executor == "local":
            given = [name for name in SLURM_ONLY if getattr(self, name)]
            if given:
                raise ValueError(f'{given[0]} is set but executor = "local" has no such thing: take it out')
        elif 2 * self.signal_lead > 60 * self.time_limit:
            raise ValueError(
                f"signal_lead = {self.signal_lead} s is more than half of time_limit = {self.time_limit} min: "
                "raise time_limit or lower signal_lead"
            )
        taken = [option for option in self.sbatch if option.split("=")[0] in OURS]
        if taken:
            raise ValueError(f"{taken[0]} is not for the profile to set: every job needs its own value of it")
        if self.port_range:
            first, last = map(int, self.port_range.split("-"))
            if not 1024 <= first <= last <= 65535:
                raise ValueError(
                    f'port_range = "{self.port_range}": give two ports from 1024 to 65535, the lower first'
                )
        return self


def profile_names(folder: Path = PROFILES) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def load_profile(name: str, folder: Path = PROFILES) -> ClusterProfile:
    """The profile called `name` in slurm/profiles, or in the file `name` where that is a path.

    Raises ClusterError with what is wrong and what would be valid.
    """
    is_path = "/" in name or name.endswith(".toml")
    path = Path(name).expanduser() if is_path else folder / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        known = ", ".join(profile_names(folder)) or "none"
        raise ClusterError(
            f"cluster.profile = {name!r}: there is no file {path}. Known profiles: {known}; or give a file's path"
        ) from None
    except (OSError, ValueError) as error:
        raise ClusterError(f"cluster.profile = {name!r}: {path} is not readable TOML: {error}") from None
    try:
        return ClusterProfile.model_validate(values)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'profile'} = {e['input']!r}: {e['msg']}" for e in error.errors()]
        raise ClusterError(f"cluster.profile = {name!r} ({path}): " + "; ".join(lines)) from None
