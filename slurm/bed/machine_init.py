"""First process of one machine of the bed: makes its namespaces, then only reaps. SIGKILL to it is a power cut.

Started as `python machine_init.py FOLDER MACHINE`, told by one line of JSON on standard input (see `Plan`). Writes its
process id as this host sees it, waits for a second line that says that the network cable is plugged in, writes `ready`.
Runs on its own, without the rest of the package: once /tmp and unreadable folders are covered, its source may be gone.
"""

import ctypes
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import traceback
from typing import TypedDict

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000

libc = ctypes.CDLL(None, use_errno=True)


class Plan(TypedDict):
    """What the machine is to be."""

    address: str  # with prefix length
    exposed: list[str]  # paths that its unprivileged users must reach, at the same place
    private_run: bool  # a run folder of its own: its munge socket
    cgroup: str  # the bed's folder in the freezer hierarchy; empty: none


def checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = [text.encode() if text else None for text in (source, target, kind)]
    checked(libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None), f"mount {source} on {target}")


def first_hidden_ancestor(path: str, covered: set[str]) -> str | None:
    """The outermost folder above `path` that unprivileged users cannot cross, or that is covered by a private one."""
    ancestor = ""
    for part in path.strip("/").split("/")[:-1]:
        ancestor += f"/{part}"
        if ancestor in covered or not os.stat(ancestor).st_mode & stat.S_IXOTH:
            return ancestor
    return None


def cover_and_expose(private_tmp: str, exposed: list[str]) -> None:
    """A private /tmp, and every exposed path at its place even where a folder above it is closed or private."""
    opened = {path: os.open(path, os.O_PATH) for path in sorted(set(exposed))}
    tmp = os.open(private_tmp, os.O_PATH)
    covers = {path: first_hidden_ancestor(path, {"/tmp"}) for path in opened}
    mount(f"/proc/self/fd/{tmp}", "/tmp", flags=MS_BIND)
    for folder in sorted({cover for cover in covers.values() if cover and cover != "/tmp"}):
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for path, descriptor in opened.items():
        if covers[path] and not any(path.startswith(f"{other}/") and covers[other] for other in opened):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                os.makedirs(path, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            mount(f"/proc/self/fd/{descriptor}", path, flags=MS_BIND | MS_REC)
    for descriptor in (*opened.values(), tmp):
        os.close(descriptor)


def own_freezer(folder: str, cgroup: str, machine: str) -> None:
    """This machine's own part of the freezer hierarchy, at FOLDER/cgroup/freezer, where slurmd looks for the root."""
    target = f"{folder}/cgroup/freezer"
    mount("freezer", target, "cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, "freezer")
    mine = f"{target}/{cgroup}/{machine}"
    os.makedirs(mine, exist_ok=True)
    mount(mine, target, flags=MS_BIND)


def set_up_mounts(folder: str, machine: str, plan: Plan) -> None:
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    cover_and_expose(f"{folder}/tmp/{machine}", [folder, *plan["exposed"]])
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    for name in ("hosts", "passwd", "group"):
        mount(f"{folder}/etc/{name}", f"/etc/{name}", flags=MS_BIND)
    if plan["private_run"]:
        mount("tmpfs", f"{folder}/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    if plan["cgroup"]:
        own_freezer(folder, plan["cgroup"], machine)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def set_up_network(address: str) -> None:
    commands = f"link set lo up\naddress add {address} dev eth0\nlink set eth0 up\n"
    done = subprocess.run(["ip", "-batch", "-"], input=commands, text=True, capture_output=True)
    if done.returncode:
        raise OSError(f"ip: {done.stderr.strip()}")


def say(text: str) -> None:
    print(text, flush=True)


def serve(folder: str, machine: str, plan: Plan) -> None:
    """As process 1: set up, then reap for ever."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    os.umask(0o022)
    os.chdir("/")
    socket.sethostname(machine)
    set_up_mounts(folder, machine, plan)
    if sys.stdin.readline() != "plugged in\n":
        raise OSError("whoever starts the bed is gone")
    set_up_network(plan["address"])
    say("ready")
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


def main() -> None:
    folder, machine = sys.argv[1:]
    plan: Plan = json.loads(sys.stdin.readline())
    checked(
        libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET),
        "unshare (are there CAP_SYS_ADMIN and CAP_NET_ADMIN?)",
    )
    child = os.fork()
    if child:
        say(str(child))
        os._exit(0)
    try:
        serve(folder, machine, plan)
    except BaseException as error:
        traceback.print_exc()
        say(f"failed: {error}")
        os._exit(1)


if __name__ == "__main__":
    main()
