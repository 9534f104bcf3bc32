"""Machines of a bed: the processes that are their namespaces, and commands run inside them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from slurm.bed import machine_init, network
from slurm.bed.description import CONTROLLER, LOGIN, BedError, Description, cgroup_name

INIT = Path(machine_init.__file__)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def wait_until(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Raises BedError when `condition` does not hold within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise BedError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it does not run. Tells a reused id from the old one."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]) if alive(pid) else 0
    except (FileNotFoundError, ProcessLookupError):
        return 0


def running(folder: str) -> dict[int, str]:
    """Process id → machine of every init of the bed in `folder`, found by its command line, never by a stored id."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        ours = len(words) >= 5 and words[-4].endswith(INIT.name.encode()) and words[-3] == os.fsencode(folder)
        if ours and alive(int(entry)):
            found[int(entry)] = os.fsdecode(words[-2])
    return found


class Process(NamedTuple):
    """A process inside a machine, as this host sees it."""

    machine: str
    pid: int
    uid: int
    started: int  # with `pid`, names it for ever
    command: str


def processes(folder: str) -> list[Process]:
    """Everything that runs inside the machines of the bed in `folder`."""
    spaces = {os.readlink(f"/proc/{pid}/ns/pid"): machine for pid, machine in running(folder).items()}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            machine = spaces.get(os.readlink(entry / "ns" / "pid"))
            if machine is not None and (started := start_time(int(entry.name))):
                command = (entry / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
                found.append(Process(machine, int(entry.name), entry.stat().st_uid, started, command))
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended just now; not even root's to see
            continue
    return found


def power_off(pids: Sequence[int]) -> None:
    """Like a power cut: every process of the machines dies at once, files as they are."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    wait_until(lambda: not any(map(alive, pids)), f"processes {list(pids)} killed", 30)


def power_on(bed: Description, machines: Sequence[str]) -> dict[str, int]:
    """Makes the namespaces of machines that are off, with an empty /tmp. Returns their process ids.

    Raises BedError when one cannot be made; those made before it are left to the caller."""
    started = {}
    for machine in machines:
        tmp = bed.path / "tmp" / machine
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir()
        tmp.chmod(0o1777)
        plan: machine_init.Plan = {
            "address": f"{bed.address(machine)}/24",
            "exposed": list(bed.exposed),
            "private_run": machine != CONTROLLER,  # commands on this host use the controller's munge
            "cgroup": cgroup_name(bed.index) if bed.cgroup and machine not in (CONTROLLER, LOGIN) else "",
        }
        with (bed.path / "log" / f"init-{machine}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(INIT), bed.folder, machine],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                cwd="/",
                env={"PATH": PATH},
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(plan) + "\n")
        process.stdin.flush()
        started[machine] = process
    pids = {machine: int(answer(bed, machine, process, str.isdigit)) for machine, process in started.items()}
    network.plug_in(bed, pids)
    for process in started.values():
        assert process.stdin is not None
        process.stdin.write("plugged in\n")
        process.stdin.flush()
    for machine, process in started.items():
        answer(bed, machine, process, "ready".__eq__)
        process.communicate()
    return pids


def answer(bed: Description, machine: str, process: "subprocess.Popen[str]", expected: Callable[[str], bool]) -> str:
    """The init's next line."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not expected(line):
        log = bed.path / "log" / f"init-{machine}.log"
        raise BedError(f"{machine} did not start: {line or log.read_text().strip()[-500:] or 'no answer'} (log: {log})")
    return line


def environment(bed: Description, user: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a fresh login of `user` would have: nothing of the caller's environment."""
    home = str(bed.home(user))
    return {
        "PATH": PATH,
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "SLURM_CONF": str(bed.slurm_conf),
        **(extra or {}),
    }


def command_line(
    bed: Description, pid: int, command: Sequence[str], user: str, cwd: str | None, env: Mapping[str, str] | None
) -> list[str]:
    """`command` inside the machine whose init is `pid`. It is killed when the process that this starts is killed."""
    uid = bed.uid(user)
    enter = ["nsenter", "-t", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", "-S", str(uid), "-G", str(uid)]
    variables = [f"{name}={value}" for name, value in environment(bed, user, env).items()]
    place = cwd or str(bed.home(user))
    return [*enter, "--", "setpriv", "--pdeathsig", "KILL", "env", "-i", f"--chdir={place}", *variables, *command]


def popen(
    bed: Description,
    machine: str,
    command: Sequence[str],
    *,
    user: str = "root",
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
) -> "subprocess.Popen[str]":
    """Starts `command` on a machine. The process id is that of a helper that ends with it; see `inside`."""
    pid = pid_of(bed, machine)
    call = command_line(bed, pid, command, user, cwd, env)
    return subprocess.Popen(call, stdin=stdin, stdout=stdout, stderr=stderr, text=True)


def inside(helper: int) -> int | None:
    """Process id, on this host, of the command that a helper of `popen` runs; None before it runs or once it has ended."""
    try:
        children = Path(f"/proc/{helper}/task/{helper}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(children[0]) if children else None


def pid_of(bed: Description, machine: str) -> int:
    """Process id of a machine's init. Raises BedError if it is off."""
    for pid, name in running(bed.folder).items():
        if name == machine:
            return pid
    raise BedError(f"{machine} is off: `slurm/testbed power-on {machine}` starts it")
