"""Bridge and cables of a bed on this host."""

import ipaddress
import json
import re
import subprocess
from pathlib import Path

from slurm.bed.description import BedError, Description

MAX_INDEX = 250


def ip(*arguments: str, commands: str | None = None) -> str:
    """Runs `ip`; `commands` go to its batch mode. Raises BedError with what it said."""
    call = ["ip", *arguments]
    done = subprocess.run(call, input=commands, text=True, capture_output=True)
    if done.returncode:
        raise BedError(f"{' '.join(call)} {commands or ''}: {done.stderr.strip()}")
    return done.stdout


def bridges() -> dict[int, str]:
    """Index → folder of every bed's bridge on this host."""
    found = {}
    for link in Path("/sys/class/net").glob("slbed*"):
        if match := re.fullmatch(r"slbed(\d+)", link.name):
            try:
                found[int(match[1])] = (link / "ifalias").read_text().strip()
            except OSError:  # just removed
                continue
    return found


def free_index(network: str) -> int:
    """Smallest number whose /24 of `network` (two octets) overlaps no route or address, and whose bridge is free."""
    taken = [
        ipaddress.ip_network(text, strict=False) for text in re.findall(r"\d+(?:\.\d+){3}/\d+", ip("-4", "address"))
    ]
    for route in json.loads(ip("-json", "-4", "route", "show", "table", "all") or "[]"):
        if re.match(r"\d", route.get("dst", "")):
            taken.append(ipaddress.ip_network(route["dst"], strict=False))
    there = bridges()
    for index in range(1, MAX_INDEX + 1):
        mine = ipaddress.ip_network(f"{network}.{index}.0/24")
        if index not in there and not any(mine.overlaps(other) for other in taken):
            return index
    raise BedError(f"no free network in {network}.0.0/16: choose another two octets with --network")


def create_bridge(bed: Description) -> None:
    """A bridge with this host's address on it; its alias names the bed's folder."""
    ip(
        "-batch",
        "-",
        commands=f"""link add {bed.bridge} type bridge
link set {bed.bridge} alias {bed.folder}
address add {bed.address("host")}/24 dev {bed.bridge}
link set {bed.bridge} up
""",
    )


def plug_in(bed: Description, pids: dict[str, int]) -> None:
    """A cable from the bridge to `eth0` of each machine, named by the process id of its init."""
    lines = []
    for machine, pid in pids.items():
        cable = bed.cable(machine)
        lines += [
            f"link add {cable} type veth peer name eth0 netns {pid}",
            f"link set {cable} master {bed.bridge} up",
        ]
    ip("-batch", "-", commands="\n".join(lines) + "\n")


def connected(bed: Description, machine: str) -> bool:
    return Path(f"/sys/class/net/{bed.cable(machine)}/master").exists()


def cut(bed: Description, machine: str) -> None:
    """Packets are lost silently in both directions; both ends see their link up."""
    ip("link", "set", bed.cable(machine), "nomaster")


def mend(bed: Description, machine: str) -> None:
    ip("link", "set", bed.cable(machine), "master", bed.bridge)


def remove(index: int) -> None:
    """The bridge and every cable of a bed, where they are still there."""
    for link in Path("/sys/class/net").iterdir():
        if link.name == f"slbed{index}" or link.name.startswith(f"slb{index}-"):
            # A cable also goes by itself, when the network namespace of its other end is torn down.
            subprocess.run(["ip", "link", "delete", link.name], capture_output=True)
