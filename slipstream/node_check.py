"""Is this node fit to train on? Looked at by each leader before a model is loaded: minutes later the same fault costs more.

What a check finds is worded for an exit record whose reason begins with `node HOST: `, by which a node is blamed.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SMI_TIMEOUT_S = 60.0
MEMORY_PER_RANK = 512 * 2**20  # bytes of host memory without which not even the libraries can be loaded
TEMPORARY_SPACE = 256 * 2**20  # bytes
FOREIGN_MIB = 1024.0  # GPU memory that somebody else may hold, as a desktop or a monitor does

_IDENTITY = "index,uuid,memory.total"
# newer than some drivers: asked for apart, and without an answer nothing is concluded
_HEALTH = ("ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")
_ACTION = ("gpu_recovery_action",)
_LOST = re.compile(r"unable to determine the device handle.*|.*gpu is lost.*|.*fallen off the bus.*", re.IGNORECASE)
_NO_DRIVER = re.compile(r"NVIDIA-SMI has failed.*|Failed to initialize NVML.*|No devices were found.*", re.IGNORECASE)


class NodeFault(RuntimeError):
    """This node cannot do its part; the text begins with `node HOST: `."""

    @classmethod
    def of(cls, problems: Sequence[str], host: str | None = None) -> "NodeFault":
        return cls(f"node {host or socket.gethostname()}: {'; '.join(problems)}")


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    index: str
    uuid: str
    memory_mib: float | None


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    uuid: str
    pid: int
    memory_mib: float | None


def _number(text: str) -> float | None:
    """The number in a cell; None for "[N/A]" and its like."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)", text)
    return float(match[1]) if match else None


def _rows(output: str, columns: int) -> list[list[str]]:
    cells = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    return [row for row in cells if len(row) == columns]


def parse_gpus(output: str) -> list[Gpu]:
    """From `--query-gpu=index,uuid,memory.total --format=csv,noheader,nounits`; what is no row of it is left out."""
    return [Gpu(row[0], row[1], _number(row[2])) for row in _rows(output, 3) if row[0].isdigit()]


def parse_processes(output: str) -> list[GpuProcess]:
    """From `--query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits`."""
    return [GpuProcess(row[0], int(row[1]), _number(row[2])) for row in _rows(output, 3) if row[1].isdigit()]


def complaints(output: str) -> list[str]:
    """What nvidia-smi says in place of an answer: a lost GPU, no driver."""
    found = (_LOST.match(line.strip()) or _NO_DRIVER.match(line.strip()) for line in output.splitlines())
    return [match[0] for match in found if match]


def unhealthy(output: str, names: Sequence[str], ours: Sequence[str]) -> list[str]:
    """What stands against GPUs of `ours` (uuids), from `--query-gpu=uuid,<names> --format=csv,noheader,nounits`."""
    problems = []
    for row in _rows(output, len(names) + 1):
        if row[0] not in ours:
            continue
        for name, cell in zip(names, row[1:], strict=True):
            if cell.lower() not in ("0", "no", "none") and not cell.startswith("["):
                problems.append(f"GPU {row[0]} has {name} = {cell}")
    return problems


def select(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by index or by (the beginning of) their uuid; all where it is not set."""
    if visible is None:
        return list(gpus)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        gpu for name in names for gpu in gpus if name == gpu.index or (not name.isdigit() and gpu.uuid.startswith(name))
    ]


def foreign(processes: Sequence[GpuProcess], ours: Sequence[Gpu], own: set[int]) -> list[str]:
    """The processes on our GPUs that are not among `own` (pids), with more memory than `FOREIGN_MIB` or an unknown amount."""
    named = {gpu.uuid: gpu.index for gpu in ours}
    return [
        f"process {process.pid} of somebody else computes on GPU {named[process.uuid]}"
        + ("" if process.memory_mib is None else f" and holds {process.memory_mib:g} MiB")
        for process in processes
        if process.uuid in named
        and process.pid not in own
        and (process.memory_mib is None or process.memory_mib > FOREIGN_MIB)
    ]


def _smi(program: str, *arguments: str) -> tuple[bool, str]:
    """Whether nvidia-smi succeeded, and all that it wrote."""
    answer = subprocess.run(
        [program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SMI_TIMEOUT_S,
        check=False,
    )
    return answer.returncode == 0, answer.stdout.decode(errors="replace")


def own_processes(token_file: Path | None) -> set[int]:
    """This process, what it started, and what carries the run's token file in its environment: the run's own server."""
    me = psutil.Process()
    own = {me.pid, *(child.pid for child in me.children(recursive=True))}
    if token_file is not None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if str(token_file) in process.environ().values():
                    own.add(process.pid)
    return own


def gpu_problems(gpus: int, environment: Mapping[str, str], own: set[int], program: str | None) -> list[str]:
    """What is wrong with the GPUs of this node.

    Args:
        gpus: how many are asked for; 0: none is looked at.
        own: pids that are no strangers.
        program: path of nvidia-smi; without it only the names in CUDA_VISIBLE_DEVICES are counted.
    """
    if gpus == 0:
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if program is None or (visible or "").startswith("MIG-"):
        count = None if visible is None else len([name for name in visible.split(",") if name.strip()])
        return (
            []
            if count is None or count >= gpus
            else [f"CUDA_VISIBLE_DEVICES = {visible!r}, but {gpus} GPUs are needed"]
        )
    form = "--format=csv,noheader,nounits"
    try:
        succeeded, output = _smi(program, f"--query-gpu={_IDENTITY}", form)
        problems = complaints(output)
        if not succeeded and not problems:
            problems = [f"nvidia-smi failed: {' '.join(output.split())[:200]}"]
        ours = select(parse_gpus(output), visible)
        if len(ours) < gpus:
            named = "" if visible is None else f" of CUDA_VISIBLE_DEVICES = {visible!r}"
            problems.append(f"nvidia-smi lists {len(ours)} GPUs{named}, but {gpus} are needed")
        for names in (_HEALTH, _ACTION):
            succeeded, output = _smi(program, f"--query-gpu={','.join(('uuid', *names))}", form)
            if succeeded:
                problems += unhealthy(output, names, [gpu.uuid for gpu in ours])
        succeeded, output = _smi(program, "--query-compute-apps=gpu_uuid,pid,used_memory", form)
        if succeeded:
            problems += foreign(parse_processes(output), ours, own)
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi does not answer within {SMI_TIMEOUT_S:g} s"]
    except OSError as error:
        return [f"nvidia-smi cannot be run: {error}"]
    return problems


def host_problems(ranks: int, temporary: str) -> list[str]:
    """What is wrong with the memory of this node, and with the space in its temporary folder."""
    problems = []
    available = psutil.virtual_memory().available
    if available < ranks * MEMORY_PER_RANK:
        problems.append(f"{available / 2**30:.1f} GiB of memory are free, too little for {ranks} processes")
    try:
        space = shutil.disk_usage(temporary).free
        with tempfile.TemporaryFile(dir=temporary) as file:
            file.write(b"x")
    except OSError as error:
        return [*problems, f"the temporary folder {temporary} cannot be used: {error.strerror or error}"]
    if space < TEMPORARY_SPACE:
        problems.append(f"{space / 2**20:.0f} MiB are free in the temporary folder {temporary} (TMPDIR)")
    return problems


def check_node(gpus: int, ranks: int, token_file: Path | None = None) -> None:
    """Raises NodeFault naming everything that stands in the way of `ranks` processes on `gpus` GPUs of this node."""
    program = shutil.which("nvidia-smi") if gpus else None
    own = own_processes(token_file) if program else set()
    problems = gpu_problems(gpus, os.environ, own, program) + host_problems(ranks, tempfile.gettempdir())
    if problems:
        raise NodeFault.of(problems)
