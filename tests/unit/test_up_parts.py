"""What `slipstream up` is made of, without a server: state files, ports, back-off, logs."""

import base64
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.connection import PrefectRefused, asks_nobody, connect, is_loopback
from flows.prefect_api import PrefectUnavailable
from flows.reconciliation import prefect_here
from flows.up import state as up_state
from flows.up.engine import remove_old
from flows.up.run import bring_down, farewell
from flows.up.supervised import MOST_WAIT_S, Supervised, rotate, wait_before
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "home"


def test_the_password_is_made_once_and_only_its_owner_can_read_it(home: Path) -> None:
    first = up_state.auth_string()
    name, _, secret = first.partition(":")
    assert name == "slipstream"
    assert len(secret) >= 32
    assert (home / "auth").stat().st_mode & 0o777 == 0o600
    assert up_state.auth_string() == first


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (b"a:b", 0o640, "others can read"),
        (b"no colon", 0o600, "NAME:PASSWORD"),
        (b"a:", 0o600, "NAME:PASSWORD"),
        (b"\xff\xfe:b", 0o600, "NAME:PASSWORD"),
    ],
)
def test_a_password_that_is_none_is_refused(home: Path, text: bytes, mode: int, words: str) -> None:
    up_state.auth_file().write_bytes(text)
    up_state.auth_file().chmod(mode)
    with pytest.raises(up_state.UpError, match=words):
        up_state.auth_string()


@pytest.mark.parametrize(
    ("asked", "last", "ports"),
    [
        (None, None, [4200, 0]),
        (None, 4711, [4711, 4200, 0]),
        (None, 4200, [4200, 0]),
        (0, 4711, [0]),
        (5000, 4711, [5000]),
    ],
)
def test_which_ports_are_tried(asked: int | None, last: int | None, ports: list[int]) -> None:
    assert up_state.port_candidates(asked, last) == ports


def test_the_port_is_kept_and_given_up_only_where_it_is_taken(home: Path) -> None:
    with up_state.listen(0) as first:
        port = first.getsockname()[1]
        assert (home / "port").read_text() == f"{port}\n"
    with up_state.listen(None) as again:
        assert again.getsockname() == ("127.0.0.1", port)
        with pytest.raises(up_state.UpError, match=f"port {port} on 127.0.0.1.*--port"):
            up_state.listen(port)
        with up_state.listen(None) as other:
            assert other.getsockname()[1] != port


HOLD = """
import sys, time
from flows.up.state import holding
with holding(["server"]) as free:
    print(free, flush=True)
    time.sleep(600)
"""


def test_a_part_is_run_once_and_given_back_however_its_process_ends(home: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "['server']\n"
        assert up_state.holder("server") == up_state.Holder(holder.pid, socket.gethostname())
        with up_state.holding(["server", "workers"]) as free:
            assert free == ["workers"]
        assert up_state.holder("workers") is None
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert up_state.holder("server") is None
    with up_state.holding(["server"]) as free:
        assert free == ["server"]


def test_a_process_of_another_host_is_not_ended_by_its_number(home: Path) -> None:
    """A lock on a network file system is seen from every host; the number in it means a process of one."""
    victim = subprocess.Popen(["sleep", "600"])
    try:
        with up_state.holding(["workers"]):
            (home / "workers.lock").write_text(f"{victim.pid} login2\n")
            with pytest.raises(up_state.UpError, match="runs on login2"):
                bring_down(print, 0)
        assert victim.poll() is None
        assert str(up_state.Holder(7, "login2")) == "process 7 on login2"
    finally:
        victim.kill()
        victim.wait()


def test_what_is_damaged_is_told_and_down_removes_it(home: Path) -> None:
    up_state.forget_up()
    (home / "up.json").write_text("{")
    with pytest.raises(up_state.UpError, match=r"up\.json is damaged.*slipstream down"):
        connect()
    assert prefect_here() is None
    assert bring_down(lambda text: None) == 0
    assert not (home / "up.json").exists()
    for text in ("²", "x", "123456", ""):
        (home / "port").write_text(text)
        assert up_state.last_port() is None


def test_nobody_is_shown_the_password_of_a_server_that_has_gone(home: Path) -> None:
    """Its port may be another user's by now."""
    up_state.auth_string()
    up_state.write_up("http://127.0.0.1:4200/api", "http://127.0.0.1:4200", ready=True)
    assert prefect_here() is None
    with up_state.holding(["server"]):
        here = prefect_here()
    assert here is not None
    assert here.url == "http://127.0.0.1:4200/api"
    here.close()


class Api(BaseHTTPRequestHandler):
    """Answers like a Prefect API, to whoever has the password."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        known = self.headers["Authorization"] == f"Basic {base64.b64encode(b'me:s3cret').decode()}"
        if self.path.startswith("/wants-a-token/"):
            self.answer(403, b"")
        else:
            self.answer(404 if not self.path.startswith("/api/") else 200 if known else 401, b"3")

    def do_GET(self) -> None:
        self.answer(200, b'"3.9.1"')

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def api() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_that_lets_us_not_in_is_told_at_once(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://{api}/api")
    with pytest.raises(PrefectRefused, match=r"\(401 Unauthorized\): PREFECT_API_AUTH_STRING"):
        connect()
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:s3cret")
    assert connect().url == f"http://{api}/api"
    monkeypatch.setenv("PREFECT_API_URL", f"http://{api}")
    with pytest.raises(PrefectRefused, match=r"is no Prefect API.*/api at its end"):
        connect()


def test_a_server_that_wants_a_token_and_no_password_asks_nobody(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asks_nobody(f"http://{api}/wants-a-token")
    assert not asks_nobody(f"http://{api}/api")
    monkeypatch.setenv("PREFECT_API_URL", f"http://{api}/wants-a-token")
    assert connect().url == f"http://{api}/wants-a-token"


def test_a_password_in_an_address_is_used_and_not_shown(api: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://me:s3cret@{api}/api")
    rest = prefect_here()
    assert rest is not None
    assert (rest.url, rest.call("POST", "flows/count", {})) == (f"http://{api}/api", 3)
    rest.close()
    assert connect().url == os.environ["PREFECT_API_URL"] == f"http://{api}/api"
    monkeypatch.setenv("PREFECT_API_URL", "http://me:s3cret@127.0.0.1:1/api")
    with pytest.raises(PrefectUnavailable, match=r"^((?!s3cret).)*does not answer((?!private).)*$"):
        connect()


def test_a_profile_s_password_is_used_by_reconciliation_too(
    api: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(exist_ok=True)
    profile = f'PREFECT_API_URL = "http://{api}/api"\nPREFECT_API_AUTH_STRING = "me:s3cret"\n'
    (home / "profiles.toml").write_text(f'active = "a"\n[profiles.a]\n{profile}')
    monkeypatch.setenv("PREFECT_HOME", str(home))
    rest = prefect_here()
    assert rest is not None
    assert rest.call("POST", "flows/count", {}) == 3
    rest.close()
    assert connect().source == "Prefect's active profile"


def test_a_server_whose_process_is_gone_is_none(home: Path) -> None:
    up_state.write_up("http://127.0.0.1:1/api", "http://127.0.0.1:1", ready=True)
    assert up_state.read_up() is not None
    assert up_state.running() is None
    with pytest.raises(PrefectUnavailable, match="slipstream up"):
        connect()


def test_a_server_on_another_host_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: "login2")
        up_state.write_up("http://127.0.0.1:1/api", "http://127.0.0.1:1", ready=True)
    with pytest.raises(PrefectUnavailable, match="runs on login2"):
        connect()


def test_a_server_of_ours_that_does_not_answer_is_told(home: Path) -> None:
    with up_state.listen(0) as probe:
        port = probe.getsockname()[1]
    with up_state.holding(["server"]):
        up_state.write_up(f"http://127.0.0.1:{port}/api", f"http://127.0.0.1:{port}", ready=True)
        with pytest.raises(PrefectUnavailable, match="does not answer"):
            connect()


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:4200/api", True),
        ("http://[::1]:4200/api", True),
        ("http://localhost:4200/api", True),
        ("http://10.1.2.3:4200/api", False),
        ("https://prefect.example.org/api", False),
        ("http://127.0.0.1.example.org/api", False),
        ("http://localhost.example.org/api", False),
        ("nonsense", False),
    ],
)
def test_what_only_this_host_reaches(url: str, loopback: bool) -> None:
    assert is_loopback(url) is loopback


@given(st.integers(0, 10_000))
def test_waits_grow_and_are_bounded(failures: int) -> None:
    assert wait_before(0) == 0
    assert wait_before(failures) <= wait_before(failures + 1) <= MOST_WAIT_S


def test_a_part_that_dies_is_started_again_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    part = Supervised(
        "part", [sys.executable, "-c", "print('here', flush=True); exit(3)"], {}, tmp_path / "l", said.append, tmp_path
    )
    part.start()
    try:

        def twice() -> bool:
            part.look()
            return (tmp_path / "l").read_text().count("here") >= 2

        wait_until(twice, "it has been started again")
    finally:
        part.stop()
    assert said[0] == f"the part has ended with code 3; started again in 1 s (log: {tmp_path / 'l'})"


def test_a_part_that_cannot_be_started_again_now_is_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    part = Supervised("part", ["sleep", "600"], {}, tmp_path / "logs" / "l", said.append, tmp_path)
    part.start()
    try:
        assert part.process is not None
        first = part.process.pid
        shutil.rmtree(tmp_path / "logs")
        (tmp_path / "logs").touch()
        part.process.kill()

        def look() -> list[str]:
            part.look()
            return [text for text in said if "cannot be started: " in text]

        wait_until(look, "it cannot be started")
        (tmp_path / "logs").unlink()
        wait_until(lambda: look() and part.process is not None and part.process.pid != first, "it is started")
    finally:
        part.stop()


def test_a_log_that_is_large_begins_again_under_its_writer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "ab") as writer:
        writer.write(b"x" * 100)
        writer.flush()
        rotate(log, most=100)
        assert not (tmp_path / "log.1").exists()
        writer.write(b"y")
        writer.flush()
        rotate(log, most=100)
        writer.write(b"after")
    assert log.read_bytes() == b"after"
    assert (tmp_path / "log.1").read_bytes() == b"x" * 100 + b"y"
    assert (tmp_path / "log.1").stat().st_mode & 0o777 == 0o600


def test_old_logs_of_flow_runs_are_removed(tmp_path: Path) -> None:
    now = time.time()
    for age in range(5):
        path = tmp_path / f"{age}.log"
        path.write_text("")
        os.utime(path, (now - age, now - age))
    remove_old(tmp_path, kept=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.log", "1.log"]


def test_the_log_of_a_flow_that_lives_stays_however_old(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "newer", "old", "living")):
        path = tmp_path / f"{name}.log"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    remove_old(tmp_path, kept=2, spared={"living"})
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["living", "new", "newer"]


def test_the_last_words_name_what_goes_on() -> None:
    assert farewell([]) == "the server and the workers have ended; no run and no job was ended"
    assert farewell([7]).endswith("\n  1 run goes on: process 7")
    assert farewell([7, 8]).endswith("\n  2 runs go on: processes 7, 8")
