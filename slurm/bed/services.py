"""The daemons of a bed, each started inside its machine. They end with the machine."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from slurm.bed import machines
from slurm.bed.configuration import CLUSTER
from slurm.bed.description import CONTROLLER, BedError, Description

CACHE = Path("/var/cache/slipstream-testbed")


def shell(bed: Description, machine: str, script: str, seconds: float = 60) -> str:
    """Runs a script of `sh` as root on a machine. Raises BedError with what it said."""
    process = machines.popen(
        bed, machine, ["sh", "-euc", script], cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    return finish(machine, script, process, seconds)


def finish(machine: str, script: str, process: "subprocess.Popen[str]", seconds: float) -> str:
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BedError(f"not within {seconds:.0f} s on {machine}: {script}") from None
    if process.returncode:
        raise BedError(f"on {machine}: {script}\n{errors.strip() or output.strip()}")
    return output


def waiting(condition: str, tries: int = 600) -> str:
    """A script that returns when `condition` holds, tried every 50 ms."""
    return f"i=0; until {condition} >/dev/null 2>&1; do i=$((i+1)); [ $i -lt {tries} ]; sleep 0.05; done"


def stopping(pid_file: Path, signal: str) -> str:
    """A script that ends the process named in a file of the machine and waits until it is gone."""
    name = shlex.quote(str(pid_file))
    return f"p=$(cat {name} 2>/dev/null) || exit 0; kill -{signal} $p 2>/dev/null || exit 0; " + waiting("! kill -0 $p")


def munge_script(bed: Description) -> str:
    folder, socket = bed.folder, bed.munge_socket
    return (
        f"h=$(hostname); munged --force --num-threads=1 --socket={socket} --key-file={folder}/munge/munge.key"
        f" --pid-file={folder}/run/munged.pid --seed-file={folder}/run/munged.seed"
        f" --log-file={folder}/log/munged-$h.log 2>>{folder}/log/munged-$h.log; " + waiting(f"munge -S {socket} -n")
    )


def start_nodes(bed: Description, names: list[str]) -> None:
    """munged and slurmd on compute nodes, munged alone on the login machine; all at once."""
    started = []
    for name in names:
        (bed.path / "spool" / name).mkdir(exist_ok=True)
        script = munge_script(bed) + (f"; slurmd -f {bed.slurm_conf}" if name in bed.node_names else "")
        pipe = subprocess.PIPE
        process = machines.popen(bed, name, ["sh", "-euc", script], cwd="/", stdout=pipe, stderr=pipe)
        started.append((name, script, process))
    for name, script, process in started:
        finish(name, script, process, 60)


def restart_slurmd(bed: Description, name: str) -> None:
    """The node's slurmd is killed and started again; its jobs go on."""
    shell(bed, name, stopping(bed.path / "run" / "slurmd.pid", "KILL"))
    shell(bed, name, f"slurmd -f {bed.slurm_conf}")


def stop(bed: Description, daemon: str, signal: str = "TERM") -> None:
    """Ends `slurmctld`, `slurmdbd` or `mysql` on the controller."""
    shell(bed, CONTROLLER, stopping(bed.path / "run" / f"{daemon}.pid", signal))


def start_controller(bed: Description) -> None:
    shell(bed, CONTROLLER, f"slurmctld -f {bed.slurm_conf}; " + waiting("scontrol ping | grep -q 'is UP'"))


def start_dbd(bed: Description) -> None:
    shell(bed, CONTROLLER, "slurmdbd; " + waiting("sacctmgr -n list cluster"))


def start_database(bed: Description) -> None:
    folder, socket = bed.folder, bed.path / "run" / "mysql.sock"
    shell(
        bed,
        CONTROLLER,
        f"setsid mariadbd --defaults-file={folder}/etc/my.cnf </dev/null >>{folder}/log/mysql.out 2>&1 & "
        + waiting(f"mariadb-admin --no-defaults --socket={socket} -uroot ping"),
    )


def start_accounting(bed: Description) -> None:
    """Database and slurmdbd. The first bed on a machine makes an empty database; later ones start from a copy."""
    if (bed.path / "db").exists():
        start_database(bed)
        start_dbd(bed)
        return
    template = CACHE / database_key()
    if template.is_dir():
        subprocess.run(["cp", "-a", "--reflink=auto", template, bed.path / "db"], check=True)
        start_database(bed)
        start_dbd(bed)
        return
    make_database(bed)
    start_dbd(bed)
    shell(bed, CONTROLLER, f"sacctmgr -i add cluster {CLUSTER}")
    stop(bed, "slurmdbd")
    stop(bed, "mysql")
    keep_template(bed, template)
    start_database(bed)
    start_dbd(bed)


def database_key() -> str:
    """Name of the template: which versions wrote it."""
    tools = ("slurmctld", "mariadbd")
    versions = [subprocess.run([tool, "-V"], text=True, capture_output=True).stdout for tool in tools]
    return "-".join(re.findall(r"\d[\w.+~-]*", version)[0] for version in versions)


def make_database(bed: Description) -> None:
    folder = bed.folder
    shell(
        bed,
        CONTROLLER,
        f"mariadb-install-db --defaults-file={folder}/etc/my.cnf --user=root --skip-test-db"
        f" --auth-root-authentication-method=normal >{folder}/log/mysql-install.log 2>&1",
        120,
    )
    start_database(bed)
    grants = "".join(
        f"CREATE USER slurm@'{host}' IDENTIFIED BY 'slurm'; GRANT ALL ON slurm_acct.* TO slurm@'{host}';"
        for host in ("127.0.0.1", "localhost")
    )
    socket = bed.path / "run" / "mysql.sock"
    sql = shlex.quote(f"CREATE DATABASE slurm_acct; {grants}")
    shell(bed, CONTROLLER, f"mariadb --no-defaults --socket={socket} -uroot -e {sql}")


def keep_template(bed: Description, template: Path) -> None:
    """Copies the database of a stopped mariadbd beside its final name, then renames: two beds may do so at once."""
    CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
    copy = CACHE / f".new-{bed.index}"
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["cp", "-a", "--reflink=auto", bed.path / "db", copy], check=True)
    try:
        copy.rename(template)
    except OSError:  # another bed was first
        shutil.rmtree(copy)
