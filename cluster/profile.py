"""Cluster profiles: what a cluster needs to know about us and we about it, one TOML file a cluster."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PROFILES = Path(__file__).resolve().parent.parent / "slurm" / "profiles"

Word = Annotated[str, Field(pattern=r"^[^\s\"'$`;&|<>\\]+$")]


class ClusterError(Exception):
    """A profile cannot be read, or the cluster refuses or cannot do what was asked."""


class ClusterProfile(BaseModel):
    """Where and how jobs are submitted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    executor: Literal["local", "slurm"] = Field(title="Executor", description="submitit's executor.")
    partition: Word | None = Field(None, title="Partition", description="SLURM partition; empty: the default.")
    account: Word | None = Field(None, title="Account", description="SLURM account.")
    qos: Word | None = Field(None, title="QoS", description="SLURM quality of service.")
    constraint: Word | None = Field(None, title="Constraint", description="Node features that SLURM must find.")
    time_limit: int = Field(1440, title="Time limit", ge=1, description="Minutes after which SLURM ends a job.")
    cpus_per_task: int | None = Field(None, title="CPUs", ge=1, description="CPU cores of a node's task.")
    memory_gb: float | None = Field(None, title="Memory", gt=0, description="GiB of memory of a node.")
    host_interface: Word | None = Field(
        None, title="Network interface", description="Interface of NCCL and gloo between nodes; empty: they choose."
    )
    setup: tuple[str, ...] = Field((), title="Setup", description="Shell lines that run before a job's command.")
    sbatch: tuple[Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=.*)?$")], ...] = Field(
        (), title="sbatch options", description="More options of sbatch, like --exclusive or --reservation=NAME."
    )
    keep_environment: tuple[Word, ...] = Field(
        (), title="Kept environment", description="Variables passed to jobs although their names look like secrets."
    )

    @model_validator(mode="after")
    def _possible(self) -> "ClusterProfile":
        if self.executor == "local":
            given = [name for name in ("partition", "account", "qos", "constraint", "sbatch") if getattr(self, name)]
            if given:
                raise ValueError(f'{given[0]} is set but executor = "local" has no such thing: take it out')
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
