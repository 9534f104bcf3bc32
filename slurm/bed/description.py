"""What a bed is: its folder, machines, users and addresses, kept in one JSON file."""

import json
import os
import pwd
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

CONTROLLER = "ctl"
LOGIN = "login"
MAX_NODES = 64
FIRST_UID = 58001
STATE_FILE = "bed.json"
FORMAT = 1
MAX_FOLDER = 88  # a socket's path has 107 characters at most


class BedError(RuntimeError):
    """The bed cannot do what was asked; the message says why and what helps."""


def default_folder() -> Path:
    """Folder of the bed that is meant when none is named: $SLIPSTREAM_TESTBED, else one in /var/tmp."""
    return Path(os.environ.get("SLIPSTREAM_TESTBED", "/var/tmp/slipstream-testbed"))


def cgroup_name(index: int) -> str:
    return f"slipstream-bed-{index}"


@dataclass(frozen=True)
class Description:
    """One bed. `index` numbers its network, its bridge and its cgroup; it is unique among the beds of a machine."""

    folder: str
    index: int
    nodes: int = 6
    gpus: int = 8
    accounting: bool = True
    cgroup: bool = True  # jobs are tracked by a freezer cgroup; without it by parent process
    network: str = "10.213"
    limited_mb: int = 64
    grace_seconds: int = 10
    node_timeout: int = 10
    users: dict[str, int] = field(default_factory=dict)
    exposed: tuple[str, ...] = ()
    owner: int = 0  # process whose end orphans the bed; 0: it stays until `down`
    owner_started: int = 0
    ready: bool = False  # started to the end
    format: int = FORMAT

    def __post_init__(self) -> None:
        if len(self.folder) > MAX_FOLDER:
            raise BedError(f"{self.folder} is longer than {MAX_FOLDER} characters: sockets in it would not open")

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def node_names(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    @property
    def machines(self) -> list[str]:
        """Controller, login machine, compute nodes."""
        return [CONTROLLER, LOGIN, *self.node_names]

    @property
    def bridge(self) -> str:
        return f"slbed{self.index}"

    def cable(self, machine: str) -> str:
        """Name of the host's end of a machine's virtual network cable."""
        return f"slb{self.index}-{machine}"

    def address(self, machine: str) -> str:
        """IPv4 address of a machine; of this host on the bed's network for `host`."""
        last = {LOGIN: 252, CONTROLLER: 253, "host": 254}.get(machine)
        return f"{self.network}.{self.index}.{last or self.node_names.index(machine) + 1}"

    @property
    def slurm_conf(self) -> Path:
        return self.path / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.path / "run" / "munge.socket"

    def home(self, user: str) -> Path:
        return Path("/root") if user == "root" else self.path / "home" / user

    def uid(self, user: str) -> int:
        if user == "root":
            return 0
        if user not in self.users:
            raise BedError(f"user {user!r} is not one of the bed's: root, {', '.join(self.users)}")
        return self.users[user]

    def node(self, name: str) -> str:
        """`3` or `n3` → `n3`. Raises BedError for anything that is not a compute node."""
        wanted = f"n{name}" if name.isdigit() else name
        if wanted not in self.node_names:
            raise BedError(f"no node {name!r} in this bed: {self.node_names[0]} to {self.node_names[-1]}")
        return wanted

    def machine(self, name: str) -> str:
        """Like `node`, and `ctl` and `login` too."""
        return name if name in (CONTROLLER, LOGIN) else self.node(name)

    def save(self) -> None:
        target = self.path / STATE_FILE
        temporary = target.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")
        temporary.replace(target)


def load(folder: Path) -> Description:
    """The bed in `folder`. Raises BedError where there is none."""
    try:
        values = json.loads((folder / STATE_FILE).read_text())
    except FileNotFoundError:
        raise BedError(f"no bed in {folder}: start one with `slurm/testbed up --dir {folder}`") from None
    except ValueError as error:
        raise BedError(f"{folder / STATE_FILE} is damaged ({error}): `slurm/testbed up` or `down` cleans up") from None
    if values.get("format") != FORMAT:
        raise BedError(f"{folder / STATE_FILE} was written by another version: `slurm/testbed down` removes that bed")
    values["exposed"] = tuple(values["exposed"])
    return Description(**values)


def free_uids(names: Iterable[str]) -> dict[str, int]:
    """Ids for the bed's users that nobody on this machine has. They exist only inside the bed."""
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    free = (uid for uid in range(FIRST_UID, 60000) if uid not in taken)
    return dict(zip(names, free, strict=False))
