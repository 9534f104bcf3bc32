"""The command line: slurm/testbed."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm.bed import bed as beds
from slurm.bed import machines, network
from slurm.bed.bed import Bed
from slurm.bed.description import BedError, default_folder
from slurm.bed.packages import install, unusable

ON_A_NODE: dict[str, tuple[str, Callable[[Bed, str], None]]] = {
    "power-off": ("every process of a machine dies at once", Bed.power_off),
    "power-on": ("a machine that is off boots", Bed.power_on),
    "partition": ("a machine's network is cut, its processes go on", Bed.partition),
    "heal": ("a machine's network is whole again", Bed.heal),
    "drain": ("a node takes no more jobs", Bed.drain),
    "resume": ("a drained or down node takes jobs again", Bed.resume),
    "slurmd-restart": ("a node's slurmd is killed and started; its jobs go on", Bed.restart_slurmd),
}
ON_THE_BED: dict[str, tuple[str, Callable[[Bed], None]]] = {
    "controller-stop": ("slurmctld ends", Bed.stop_controller),
    "controller-start": ("slurmctld starts again", Bed.start_controller),
    "dbd-stop": ("slurmdbd ends", Bed.stop_dbd),
    "dbd-start": ("slurmdbd starts again", Bed.start_dbd),
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="slurm/testbed",
        description="A private SLURM of a few nodes on this machine, for tests. See docs/testbed.md.",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument(
            "--dir",
            type=Path,
            default=default_folder(),
            help="folder of the bed (default: $SLIPSTREAM_TESTBED or %(default)s)",
        )
        return command

    installing = add("install", "install the packages that a bed needs (Debian, root)")
    installing.add_argument("--if-possible", action="store_true", help="where it cannot, say so and succeed")
    add("check", "say whether a bed can run here, and what is missing")
    up = add("up", "start a bed")
    up.add_argument("--nodes", type=int, default=6)
    up.add_argument("--gpus", type=int, default=8, help="fake GPUs of each node")
    up.add_argument("--no-accounting", action="store_true", help="without slurmdbd: sacct fails")
    up.add_argument(
        "--bind",
        action="append",
        default=[],
        metavar="PATH",
        help="a path that jobs must reach, in /tmp or a closed folder",
    )
    up.add_argument("--limited", type=int, default=64, metavar="MB", help="size of the size-limited storage")
    up.add_argument("--grace", type=int, default=10, metavar="SECONDS", help="between a preemption's TERM and its KILL")
    up.add_argument("--node-timeout", type=int, default=10, metavar="SECONDS", help="until a silent node is given up")
    up.add_argument("--network", default="10.213", help="first two octets of the bed's addresses")
    down = add("down", "end a bed and remove its folder")
    down.add_argument("--keep-files", action="store_true", help="leave the folder, with its logs")
    add("status", "nodes, machines and folders of a bed")
    add("env", "shell exports for commands on this host")
    for name, (about, _) in (ON_A_NODE | ON_THE_BED).items():
        command = add(name, about)
        if name in ON_A_NODE:
            command.add_argument("node", help="3 or n3; power and network also of login and ctl")
    storage = add("storage", "make the limited or the readonly storage ro, rw or N MB large")
    storage.add_argument("name", choices=["limited", "readonly"])
    storage.add_argument("setting", help="ro, rw or a number of MB")
    execute = add("exec", "run a command on a machine: exec n1 --user bed1 -- hostname")
    execute.add_argument("machine", help="3 or n3, login, ctl")
    execute.add_argument("--user", default="root")
    execute.add_argument("--cwd", default=None, help="folder to run in (default: the user's home)")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    options = parser().parse_args(given[:split])
    options.words = given[split + 1 :]
    try:
        return run(options)
    except BedError as error:
        print(f"testbed: error: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    name: str = options.command
    if name not in ("install", "check", "env", "status") and os.geteuid() != 0:
        raise BedError(f"`{name}` needs root (namespaces of other processes): sudo slurm/testbed {name} …")
    if name == "install":
        install_packages(options.if_possible)
    elif name == "check":
        if reason := unusable():
            raise BedError(reason)
        print("a bed can run here")
    elif name == "up":
        start(options)
    elif name == "down":
        print("\n".join(f"removed {what}" for what in beds.down(options.dir, options.keep_files)) or "nothing there")
    elif name in ON_A_NODE:
        ON_A_NODE[name][1](Bed.attach(options.dir), options.node)
    elif name in ON_THE_BED:
        ON_THE_BED[name][1](Bed.attach(options.dir))
    else:
        bed = Bed.attach(options.dir)
        if name == "storage":
            bed.storage(options.name, options.setting)
        elif name == "status":
            print(status(bed))
        elif name == "env":
            print(exports(bed))
        elif name == "exec":
            execute(bed, options)
    return 0


def install_packages(if_possible: bool) -> None:
    try:
        packages = install()
        if if_possible and (reason := unusable()):
            raise BedError(reason)
    except BedError as error:
        if not if_possible:
            raise
        print(f"[testbed] the SLURM tests will be skipped: {error}")
    else:
        print(f"[testbed] installed {' '.join(packages)}" if packages else "[testbed] nothing to install")


def start(options: argparse.Namespace) -> None:
    begin = time.monotonic()
    bed = Bed.up(
        options.dir,
        nodes=options.nodes,
        gpus=options.gpus,
        accounting=not options.no_accounting,
        expose=options.bind,
        limited_mb=options.limited,
        grace_seconds=options.grace,
        node_timeout=options.node_timeout,
        network_prefix=options.network,
    )
    print(
        f'# up in {time.monotonic() - begin:.1f} s; to use it: eval "$(slurm/testbed env --dir {shlex.quote(str(bed.folder))})"'
    )
    print(status(bed))


def exports(bed: Bed) -> str:
    values = {"SLURM_CONF": bed.description.slurm_conf, "SLIPSTREAM_TESTBED": bed.folder}
    return "\n".join(f"export {name}={shlex.quote(str(value))}" for name, value in values.items())


def status(bed: Bed) -> str:
    description = bed.description
    on = {machine: pid for pid, machine in machines.running(description.folder).items()}
    try:
        states = bed.node_states()
    except BedError as error:
        states = {}
        print(f"testbed: the controller does not answer: {error}", file=sys.stderr)
    lines = [f"{'machine':<8} {'address':<15} {'pid':<8} {'network':<8} state"]
    for machine in description.machines:
        cable = "up" if network.connected(description, machine) else "cut"
        pid = str(on.get(machine, "off"))
        lines.append(
            f"{machine:<8} {description.address(machine):<15} {pid:<8} {cable if machine in on else '-':<8}"
            f" {states.get(machine, '-')}"
        )
    lines += [
        f"users    {', '.join(f'{user} ({uid})' for user, uid in description.users.items())}",
        f"shared   {bed.shared}",
        f"limited  {bed.limited} ({description.limited_mb} MB at start)",
        f"readonly {bed.readonly}",
        f"logs     {bed.folder / 'log'}",
        f"accounting {'on' if description.accounting else 'off'}, jobs tracked by"
        f" {'cgroup' if description.cgroup else 'parent process (no freezer cgroup on this host)'}",
    ]
    return "\n".join(lines)


def execute(bed: Bed, options: argparse.Namespace) -> None:
    if not options.words:
        raise BedError("no command: slurm/testbed exec n1 -- hostname")
    machine = bed.description.machine(options.machine)
    pid = machines.pid_of(bed.description, machine)
    call = machines.command_line(bed.description, pid, options.words, options.user, options.cwd, None)
    sys.stdout.flush()
    os.execvp(call[0], call)
