"""A bed as one object: up, down, and everything that can go wrong in between, on demand."""

import contextlib
import dataclasses
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slurm.bed import description, machines, network, packages, services, storage
from slurm.bed.description import CONTROLLER, MAX_NODES, STATE_FILE, BedError, Description

LOCK = Path("/run/lock/slipstream-testbed.lock")
ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """One bed at a time is started or ended: networks are chosen, remains are cleaned."""
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def needed_by_jobs() -> list[str]:
    """This repository, its environments and their interpreters: what a job's Python reads."""
    found = [ROOT, Path(sys.base_prefix)]
    for environment in (ROOT / ".venv", ROOT / ".venv-vllm"):
        if environment.is_dir():
            found.append(environment.resolve())
            python = environment / "bin" / "python"
            found.append(python.resolve().parent.parent)
    return sorted({str(path.resolve()) for path in found if path.exists()} - {"/", "/usr"})


def clean(folder: Path) -> list[str]:
    """Ends and unmounts what a bed in `folder` left: processes, mounts, network, cgroups. Returns what there was."""
    found = []
    if pids := machines.running(str(folder)):
        found.append(f"machines {', '.join(sorted(pids.values()))}")
        machines.power_off(list(pids))
    if mounts := storage.mounted_under(str(folder)):
        found.append(f"mounts {', '.join(mounts)}")
        storage.unmount(str(folder))
    for index, owner in network.bridges().items():
        if owner == str(folder):
            found.append(f"bridge slbed{index}")
            storage.remove_cgroup(index)
            network.remove(index)  # last: it tells whose the number is
    return found


def sweep() -> list[str]:
    """Removes beds whose owner has ended, and networks whose bed has no folder any more. Returns what there was."""
    found = []
    for index, owner in network.bridges().items():
        folder = Path(owner)
        if not (folder / STATE_FILE).exists() and not machines.running(owner):
            storage.remove_cgroup(index)
            network.remove(index)
            found.append(f"bridge slbed{index}")
            continue
        try:
            bed = description.load(folder)
        except BedError:
            continue
        if bed.owner and machines.start_time(bed.owner) != bed.owner_started:
            found += clean(folder)
            storage.delete(folder)
    return found


@dataclass(frozen=True)
class Bed:
    """A running bed. Methods raise BedError with what went wrong and what helps."""

    description: Description

    @classmethod
    def up(
        cls,
        folder: Path | None = None,
        *,
        nodes: int = 6,
        gpus: int = 8,
        accounting: bool = True,
        expose: Sequence[str | Path] = (),
        limited_mb: int = 64,
        users: Sequence[str] = ("bed1", "bed2"),
        network_prefix: str = "10.213",
        grace_seconds: int = 10,
        node_timeout: int = 10,
        owner: int = 0,
    ) -> "Bed":
        """Starts a bed in `folder` and returns when all its nodes are idle; what was left there is removed first.

        `expose`: paths that jobs must reach although they lie in /tmp or below a folder closed to others.
        `node_timeout`: seconds after which the controller gives up a silent node.
        `owner`: a process; when it has ended without `down`, the next start of any bed removes this one.
        """
        folder = (folder or description.default_folder()).resolve()
        if reason := packages.unusable(accounting):
            raise BedError(reason)
        if not 1 <= nodes <= MAX_NODES or gpus < 0:
            raise BedError(f"a bed has 1 to {MAX_NODES} nodes and no negative GPUs, not nodes={nodes}, gpus={gpus}")
        if absent := [str(path) for path in expose if not Path(path).exists()]:
            raise BedError(f"cannot expose what does not exist: {', '.join(absent)}")
        with one_at_a_time():
            sweep()
            prepare_folder(folder)
            bed = Description(
                folder=str(folder),
                index=network.free_index(network_prefix),
                nodes=nodes,
                gpus=gpus,
                accounting=accounting,
                cgroup=storage.freezer_works(),
                network=network_prefix,
                limited_mb=limited_mb,
                grace_seconds=grace_seconds,
                node_timeout=node_timeout,
                owner=owner,
                owner_started=machines.start_time(owner) if owner else 0,
                users=description.free_uids(users),
                exposed=tuple(sorted({*needed_by_jobs(), *(str(Path(path).resolve()) for path in expose)})),
            )
            bed.save()
            try:
                return cls(bed).start()
            except BaseException:
                clean(folder)  # its logs stay
                raise

    def start(self) -> "Bed":
        bed = self.description
        network.create_bridge(bed)
        storage.create(bed)
        machines.power_on(bed, bed.machines)
        self.start_controller_services()
        services.start_nodes(bed, bed.machines[1:])
        self.wait_nodes("idle", bed.node_names, 60)
        ready = dataclasses.replace(bed, ready=True)
        ready.save()
        return Bed(ready)

    @classmethod
    def attach(cls, folder: Path | None = None) -> "Bed":
        """The bed that runs in `folder`. Raises BedError where there is none, or where it does not run."""
        bed = description.load((folder or description.default_folder()).resolve())
        if not machines.running(bed.folder):
            raise BedError(f"the bed in {bed.folder} does not run: `slurm/testbed up` starts it anew")
        return cls(bed)

    def start_controller_services(self) -> None:
        services.shell(self.description, CONTROLLER, services.munge_script(self.description))
        if self.description.accounting:
            services.start_accounting(self.description)
        services.start_controller(self.description)

    def down(self, keep_files: bool = False) -> None:
        down(self.description.path, keep_files)

    # -- faults ----------------------------------------------------------------------------------------------------

    def power_off(self, name: str) -> None:
        """Every process of a machine dies at once: of a node, of `login`, or of `ctl`, the controller and its database."""
        machine = self.description.machine(name)
        machines.power_off([machines.pid_of(self.description, machine)])

    def power_on(self, name: str) -> None:
        """A machine that is off boots, its /tmp empty; returns when its services run."""
        machine = self.description.machine(name)
        if machine in self.machines_on():
            raise BedError(f"{machine} is on")
        if machine == CONTROLLER:  # its run folder is this host's: process ids from before mean nothing
            storage.empty(self.folder / "run")
        machines.power_on(self.description, [machine])
        if machine == CONTROLLER:
            self.start_controller_services()
        else:
            services.start_nodes(self.description, [machine])

    def partition(self, name: str) -> None:
        """A node's network is cut; its processes and the shared storage go on."""
        node = self.description.machine(name)
        machines.pid_of(self.description, node)
        network.cut(self.description, node)

    def heal(self, name: str) -> None:
        node = self.description.machine(name)
        machines.pid_of(self.description, node)
        network.mend(self.description, node)

    def drain(self, name: str, reason: str = "test bed") -> None:
        node = self.description.node(name)
        self.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def resume(self, name: str) -> None:
        self.command("scontrol", "update", f"NodeName={self.description.node(name)}", "State=RESUME")

    def restart_slurmd(self, name: str) -> None:
        services.restart_slurmd(self.description, self.description.node(name))

    def stop_controller(self, signal: str = "TERM") -> None:
        services.stop(self.description, "slurmctld", signal)

    def start_controller(self) -> None:
        services.start_controller(self.description)

    def stop_dbd(self, signal: str = "TERM") -> None:
        self.needs_accounting()
        services.stop(self.description, "slurmdbd", signal)

    def start_dbd(self) -> None:
        self.needs_accounting()
        services.start_dbd(self.description)

    def needs_accounting(self) -> None:
        if not self.description.accounting:
            raise BedError("this bed was started without accounting")

    def storage(self, name: str, setting: str) -> None:
        """Makes the `limited` or the `readonly` storage `ro`, `rw` or N MB large."""
        storage.change(self.description, name, setting)

    # -- use -------------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.description.path

    @property
    def shared(self) -> Path:
        """Seen at this path by every machine of the bed; everybody may write there."""
        return self.folder / "shared"

    @property
    def limited(self) -> Path:
        """Storage of a few MB: full at once."""
        return self.folder / "limited"

    @property
    def readonly(self) -> Path:
        return self.folder / "readonly"

    def command(self, *command: str, seconds: float = 60) -> str:
        """Runs a SLURM command as root on the controller, where the bed's users are known. Returns what it printed."""
        return self.run(CONTROLLER, command, cwd="/", seconds=seconds)

    def run(
        self,
        machine: str,
        command: Sequence[str],
        *,
        user: str = "root",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        seconds: float = 120,
    ) -> str:
        """Runs a command on a machine (`n1`…, `login`, `ctl`) and returns its output.

        Nothing of the caller's environment is passed; `cwd` is the user's home unless given. Raises BedError with its
        errors when it fails, and after `seconds`."""
        pipe = subprocess.PIPE
        process = machines.popen(
            self.description, machine, command, user=user, cwd=cwd, env=env, stdout=pipe, stderr=pipe
        )
        return services.finish(machine, " ".join(command), process, seconds)

    def popen(
        self,
        machine: str,
        command: Sequence[str],
        *,
        user: str = "root",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> "subprocess.Popen[str]":
        """Starts a command on a machine; see `machines.popen` and `machines.inside`."""
        return machines.popen(
            self.description, machine, command, user=user, cwd=cwd, env=env, stdout=stdout, stderr=stderr
        )

    def machines_on(self) -> dict[str, int]:
        """Machine → process id of its init, of those that are on."""
        return {machine: pid for pid, machine in machines.running(self.description.folder).items()}

    def processes(self, user: str | None = None) -> list[machines.Process]:
        """What runs on the bed, of one user or of all; SLURM's daemons too."""
        everything = machines.processes(self.description.folder)
        return everything if user is None else [one for one in everything if one.uid == self.description.uid(user)]

    def node_states(self) -> dict[str, str]:
        """Node → state as sinfo has it (`idle`, `mixed`, `down*`, …)."""
        lines = self.command("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").split("\n")
        return dict(line.split() for line in lines if line)

    def wait_nodes(self, state: str, names: Sequence[str], seconds: float = 60) -> None:
        """Waits until all these nodes are in `state`."""
        end = time.monotonic() + seconds
        while wrong := {name: now for name, now in self.node_states().items() if name in names and now != state}:
            if time.monotonic() > end:
                raise BedError(f"nodes not {state} within {seconds:.0f} s: {wrong}; logs in {self.folder / 'log'}")
            time.sleep(0.1)


def runs(folder: Path) -> bool:
    """Whether a bed in `folder` was started to the end and its controller is there."""
    try:
        ready = description.load(folder).ready
    except BedError:
        return False
    return ready and CONTROLLER in machines.running(str(folder)).values()


def prepare_folder(folder: Path) -> None:
    """An empty folder for a bed: remains of one are removed, anything else is left alone and refused."""
    if not (folder / STATE_FILE).exists():
        if folder.exists() and any(folder.iterdir()):
            raise BedError(f"{folder} is not empty and no bed: choose another folder with --dir")
        clean(folder)
    elif runs(folder):
        raise BedError(f"a bed runs in {folder}: `slurm/testbed down` ends it, --dir starts another")
    else:
        clean(folder)
        storage.delete(folder)
    folder.mkdir(parents=True, exist_ok=True)


def down(folder: Path, keep_files: bool = False) -> list[str]:
    """Ends the bed in `folder`, as far as there is one, whatever state it is in. Returns what there was."""
    folder = folder.resolve()
    if os.geteuid() != 0:
        raise BedError("ending a bed needs root")
    with one_at_a_time():
        there = (folder / STATE_FILE).exists()
        found = clean(folder)
        if there and not keep_files:
            storage.delete(folder)
            found.append(f"folder {folder}")
    return found
