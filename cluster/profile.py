"""Cluster profiles: what a cluster needs to know about us and we about it, one TOML file a cluster."""

import difflib
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.environment import NOT_SECRET, SECRET

PROFILES = Path(__file__).resolve().parent.parent / "slurm" / "profiles"

Word = Annotated[str, Field(pattern=r"^[^\s\"'$`;&|<>\\]+$")]
Features = Annotated[str, Field(pattern=r"^[^\s\"'$`;<>\\]+$")]  # "a&b", "[rack1|rack2]": sbatch's signs, not a shell's
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
BASH = "/bin/bash"

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
KEYS = {
    "partition": "--partition", "account": "--account", "qos": "--qos", "reservation": "--reservation",
    "constraint": "--constraint", "exclusive": "--exclusive", "cpus_per_task": "--cpus-per-task", "memory_gb": "--mem",
}  # fmt: skip
MOST = 8  # problems of one profile that are told


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
    constraint: Features | None = Field(None, title="Constraint", description="Node features that SLURM must find.")
    time_limit: int = Field(
        1440, title="Time limit", strict=True, ge=1, le=5_256_000, description="Minutes after which SLURM ends a job."
    )
    signal_lead: int = Field(
        180,
        title="Signal lead",
        strict=True,
        ge=1,
        description="Seconds before the time limit at which a job is told to save and leave: at least two of the longest "
        "steps, a checkpoint, and the minute by which SLURM may be early. At most half the time limit.",
    )
    exclusive: bool = Field(False, title="Exclusive", strict=True, description="Nodes are not shared with other jobs.")
    cpus_per_task: int | None = Field(
        None, title="CPUs", strict=True, ge=1, le=65536, description="CPU cores of a node's task."
    )
    memory_gb: float | None = Field(  # sbatch takes --mem=0 for all that a node has
        None, title="Memory", strict=True, ge=0.1, le=1_000_000, description="GiB of memory of a node."
    )
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
        None,
        title="Shared storage",
        description="Folder that every node sees, from the root on; storage.root must lie in it.",
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
    keep_environment: tuple[Name, ...] = Field(
        (),
        title="Kept environment",
        description="Variables that jobs get although their names look like secrets; on SLURM, where jobs inherit "
        "nothing, any besides the usual ones.",
    )
    client_timeout: float = Field(
        60.0,
        title="Client timeout",
        strict=True,
        gt=0,
        le=3600,
        description="Seconds until a SLURM client counts as hung.",
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_is_not_set(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value != "" or key not in cls.model_fields}

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
        for problem in (*_odd_texts(self), *_odd_options(self), *_odd_setup(self.setup)):
            raise ValueError(problem)
        if self.port_range:
            first, last = map(int, self.port_range.split("-"))
            if not 1024 <= first <= last <= 65535:
                raise ValueError(
                    f'port_range = "{self.port_range}": give two ports from 1024 to 65535, the lower first'
                )
        return self


def _odd_texts(profile: ClusterProfile) -> Iterator[str]:
    for name in type(profile).model_fields:
        value = getattr(profile, name)
        for text in value if isinstance(value, tuple) else (value,):
            kept = "\n\t" if name == "setup" else ""
            if isinstance(text, str) and any(not sign.isprintable() and sign not in kept for sign in text):
                yield f"{name} holds a control character (a line break, an escape): take it out"


def _odd_options(profile: ClusterProfile) -> Iterator[str]:
    """Options of sbatch that would take the place of ours, of a key of the profile, or of each other."""
    given = [option.split("=")[0] for option in profile.sbatch]
    for option, name in zip(profile.sbatch, given, strict=True):
        # sbatch takes any unambiguous beginning of an option for the option
        if name in OURS or any(ours.startswith(name) for ours in OURS):
            yield f"{option} is not for the profile to set: every job needs its own value of it"
        if name == "--clusters":
            yield "--clusters of sbatch sends jobs where squeue does not look: set SLURM_CLUSTERS in the environment"
        if given.count(name) > 1:
            yield f"{name} stands twice in sbatch: sbatch would take the last one, so leave one out"
        for key, same in KEYS.items():
            if getattr(profile, key) and same.startswith(name):
                yield f"{name} of sbatch and {key} are the same: leave one out"


def _odd_setup(lines: tuple[str, ...]) -> Iterator[str]:
    """What bash cannot read, and secrets, which a batch file shows to everybody. Their values are not repeated."""
    for number, line in enumerate(lines, 1):
        for name, value in re.findall(r"(?:^|[\s;&])([A-Za-z_]\w*)=(\S?)", line):
            path = re.search(r"_(PATH|FILE|DIR)$", name)
            if SECRET.search(name) and name not in NOT_SECRET and not path and value not in ("", "$", "`", ";"):
                yield (
                    f"line {number} of setup holds the value of {name}, and a batch file is no place for a secret: export it "
                    f'in your shell and set keep_environment = ["{name}"]'
                )
    if lines and os.access(BASH, os.X_OK):
        script = "\n".join(lines) + "\n"
        done = subprocess.run(
            [BASH, "-n"],
            input=script,
            env={"LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
        )
        if done.stderr.strip():
            said = done.stderr.strip().splitlines()[0].removeprefix(f"{BASH}: ")
            yield f"setup is no shell text: {said}: close its quotes, blocks and here-documents"


def _problem_text(detail: Any) -> str:
    """One of pydantic's findings, with the key, the value (but no line of `setup`, which may say more than it should), and
    what would be valid."""
    loc, kind = detail["loc"], detail["type"]
    key = ".".join(map(str, loc))
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(key, ClusterProfile.model_fields, n=1, cutoff=0.6)
        known = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(ClusterProfile.model_fields)}"
        return f"{key}: unknown key; {known}"
    if kind == "missing":
        return f'{key}: missing: write {key} = "local" or {key} = "slurm"'
    about = ClusterProfile.model_fields[str(loc[0])].description
    value = repr(detail["input"])
    shown = "" if loc[0] == "setup" else f" = {value if len(value) <= 120 else value[:119] + '…'}"
    says = {
        "string_pattern_mismatch": "not possible here",
        "tuple_type": 'must be a list, like ["a", "b"]',
        "string_type": "must be text in quotes",
    }
    return f"{key}{shown}: {says.get(kind) or detail['msg']} ({about})"


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
    except IsADirectoryError:
        raise ClusterError(f"cluster.profile = {name!r}: {path} is a folder: name the .toml file in it") from None
    except OSError as error:
        raise ClusterError(f"cluster.profile = {name!r}: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"cluster.profile = {name!r}: {path} is not readable TOML: {error}") from None
    try:
        return ClusterProfile.model_validate(values)
    except ValidationError as error:
        lines = [_problem_text(detail) for detail in error.errors()]
        more = f"; and {len(lines) - MOST} more" if len(lines) > MOST else ""
        raise ClusterError(f"cluster.profile = {name!r} ({path}): " + "; ".join(lines[:MOST]) + more) from None
