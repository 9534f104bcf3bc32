"""Whether this machine can have a bed, and installing what it needs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from slurm.bed.description import BedError

PACKAGES = ["slurm-wlm", "munge", "slurmdbd", "mariadb-server", "iproute2"]
COMMANDS = {
    "slurm-wlm": ["slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scontrol", "sacct", "sacctmgr"],
    "munge": ["munged", "munge"],
    "slurmdbd": ["slurmdbd"],
    "mariadb-server": ["mariadbd", "mariadb-install-db", "mariadb-admin", "mariadb"],
    "iproute2": ["ip"],
    "util-linux": ["nsenter", "setpriv", "mount", "umount"],
}
POLICY = Path("/usr/sbin/policy-rc.d")


def missing_packages(accounting: bool = True) -> list[str]:
    """Debian packages of commands that are not on PATH."""
    unneeded = set() if accounting else {"slurmdbd", "mariadb-server"}
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
    return [
        package
        for package, commands in COMMANDS.items()
        if package not in unneeded and not all(shutil.which(command, path=path) for command in commands)
    ]


def apt_command(packages: list[str]) -> str:
    return f"apt-get install -y --no-install-recommends {' '.join(packages)}"


def unusable(accounting: bool = True) -> str | None:
    """Why no bed can be had here, and what helps; None if one can."""
    if not sys.platform.startswith("linux"):
        return f"a SLURM test bed needs Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return f"a SLURM test bed needs root (network and process namespaces); this is user {os.geteuid()}: sudo"
    if packages := missing_packages(accounting):
        how = "`slurm/testbed install`, or" if is_debian() else "this is not Debian; there it would be"
        return f"a SLURM test bed needs {', '.join(packages)}: {how} `{apt_command(packages)}`"
    spaces = [
        "unshare",
        "--mount",
        "--net",
        "--pid",
        "--uts",
        "--ipc",
        "--fork",
        "mount",
        "-t",
        "tmpfs",
        "none",
        "/mnt",
    ]
    trial = subprocess.run(spaces, text=True, capture_output=True)
    if trial.returncode:
        return (
            "a SLURM test bed needs namespaces of its own, and this root may not make them"
            f" ({trial.stderr.strip()}): in a container, CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )
    return None


def is_debian() -> bool:
    return shutil.which("apt-get") is not None and Path("/etc/debian_version").exists()


def install() -> list[str]:
    """Installs what is missing with apt-get, without starting any service. Returns the packages.

    Raises BedError without root, where there is no apt-get, and with apt-get's last lines when it fails."""
    packages = missing_packages()
    if not packages:
        return []
    if not is_debian():
        raise BedError(f"this is not Debian (no apt-get): install {', '.join(packages)} by hand, or skip these tests")
    if os.geteuid() != 0:
        raise BedError(f"installing needs root: sudo {apt_command(packages)}")
    blocks = not POLICY.exists()
    if blocks:  # the packages would start munged, slurmctld and mariadbd of the machine
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        apt_get("update", "-qq")
        apt_get("install", "-y", "-qq", "--no-install-recommends", *packages)
    finally:
        if blocks:
            POLICY.unlink()
    if left := missing_packages():
        raise BedError(f"installed, and still missing: {', '.join(left)}")
    return packages


def apt_get(*arguments: str) -> None:
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise BedError(f"{' '.join(command)} failed:\n" + "\n".join(done.stdout.strip().splitlines()[-15:]))
