"""What a node of a job is: SLURM's facts as the SLIPSTREAM_* variables that leaders read."""

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from slipstream.run_folder import RunFolder

INTERFACE_ENV = "SLIPSTREAM_INTERFACE"


class NodeError(Exception):
    """This node is not what the profile says."""


def environment_file(run: RunFolder) -> Path:
    """The submitter's variables for its jobs (0600): on storage, since what sbatch is given is shown to others."""
    return run.path / "secrets" / "environment.json"


def load_environment(run: RunFolder) -> None:
    """Take the submitter's variables over, where it left some; its PYTHONPATH is searched after this job's own."""
    try:
        values = json.loads(environment_file(run).read_text())
    except FileNotFoundError:
        return
    given = values.pop("PYTHONPATH", "")
    os.environ.update(values)
    if given:
        own = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (own, given) if part)
        sys.path += [path for path in given.split(os.pathsep) if path and path not in sys.path]


def place(role: str, node: int, nodes: int, learner_nodes: int) -> tuple[str, int, int]:
    """(role, rank in the role, nodes of the role) of a node of a job; of one allocation learners are first, servers last."""
    if role != "allocation":
        return role, node, nodes
    if node < learner_nodes:
        return "learner", node, learner_nodes
    return "server", node - learner_nodes, nodes - learner_nodes


def address(interface: str | None) -> str:
    """This node's IPv4 address on `interface`; without one, that of its own name, or of the first interface that is up.

    Raises NodeError with the interfaces there are.
    """
    addresses = {
        name: found.address
        for name, all_of_it in psutil.net_if_addrs().items()
        for found in all_of_it
        if found.family == socket.AF_INET
    }
    if interface:
        if interface not in addresses:
            there = ", ".join(f"{name} ({value})" for name, value in sorted(addresses.items()))
            raise NodeError(
                f"host_interface = {interface!r} of the cluster profile has no IPv4 address on {socket.gethostname()}; "
                f"there is {there}"
            )
        return addresses[interface]
    try:
        own = socket.gethostbyname(socket.gethostname())
    except OSError:
        own = "127.0.0.1"
    if not own.startswith("127."):
        return own
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    others = [value for name, value in addresses.items() if name in up and not value.startswith("127.")]
    return others[0] if others else own


def slurm_place(environment: Mapping[str, str]) -> tuple[int, int]:
    """(index of this node in the job's step, nodes of it)."""
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or "1"
    return int(environment.get("SLURM_NODEID", "0")), int(nodes)
