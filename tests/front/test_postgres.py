"""The Prefect database in PostgreSQL, as docs/hpc.md has it. Skipped where there is no PostgreSQL."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.front_door import Front

pytestmark = pytest.mark.integration

NOBODY = "nobody"  # PostgreSQL refuses root
FOLDERS = ["/usr/bin", "/usr/local/bin", *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin")))]


def program(name: str) -> str:
    found = shutil.which(name, path=":".join([os.environ.get("PATH", ""), *FOLDERS]))
    if found is None:
        pytest.skip(f"there is no {name} here: apt-get install postgresql")
    return found


def as_nobody(*words: str) -> list[str]:
    if os.geteuid() != 0:
        return list(words)
    return ["setpriv", f"--reuid={NOBODY}", "--regid=nogroup", "--clear-groups", *words]


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Path]:
    """Folder with the socket of a PostgreSQL that trusts everybody on this machine, and listens nowhere else."""
    initdb, server, ctl = program("initdb"), program("postgres"), program("pg_ctl")
    folder = Path(subprocess.check_output(as_nobody("mktemp", "-d", "/tmp/pg-XXXXXX"), text=True).strip())
    assert server
    try:
        data = folder / "data"
        made = as_nobody(initdb, "-D", str(data), "-A", "trust", "-U", "alice", "--no-sync")
        subprocess.run(made, check=True, cwd="/", capture_output=True)
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        start = as_nobody(ctl, "-D", str(data), "-w", "-t", "120", "-l", str(folder / "log"), "-o", options, "start")
        subprocess.run(start, check=True, cwd="/", stdout=subprocess.DEVNULL)
        try:
            yield folder
        finally:
            subprocess.run(
                as_nobody(ctl, "-D", str(data), "-m", "immediate", "stop"), check=True, cwd="/", capture_output=True
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_with_postgresql(sockets: Path, tmp_path: Path) -> None:
    subprocess.run([program("createdb"), "-h", str(sockets), "-U", "alice", "slipstream_alice"], check=True)
    front = Front(
        tmp_path / "front",
        fresh=True,
        PREFECT_API_DATABASE_CONNECTION_URL=f"postgresql+asyncpg://alice@/slipstream_alice?host={sockets}",
        PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD="2592000",
    )
    try:
        front.start()
        flow_run = front.submit()
        assert front.wait_state(flow_run)["state_type"] == "COMPLETED", front.log_of(flow_run).read_text()[-3000:]
        count = [
            program("psql"),
            "-h",
            str(sockets),
            "-U",
            "alice",
            "-Atc",
            "select count(*) from flow_run",
            "slipstream_alice",
        ]
        assert int(subprocess.check_output(count, text=True)) >= 1
        assert not list((front.home / "prefect").glob("*.db"))
        settings = front.ask("GET", "admin/settings")["server"]["services"]["db_vacuum"]
        assert set(settings["enabled"]) == {"events", "flow_runs"}
        assert settings["retention_period"] in ("P30D", 2592000, 2592000.0)
    finally:
        front.close()
