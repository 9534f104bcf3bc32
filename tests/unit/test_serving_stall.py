"""When a server counts as hung, and what its leader does where it hangs or was replaced."""

import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream.config_file import dump_config
from slipstream.process import INCARNATION_ENV
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_json, write_atomic, write_json
from slipstream.serving import main as main_module
from slipstream.serving.main import Leader, withdraw_endpoint
from slipstream.serving.probe import Capabilities
from slipstream.serving.stall import Look, Stall

BUSY = Look(True, running=2, generated=5, tokens=9)


def judged(*looks: Look, every_s: float = 1.0) -> list[str]:
    stall = Stall(2.5, 0.0)
    return [stall.see(look, (index + 1) * every_s) for index, look in enumerate(looks)]


def test_no_answer_for_too_long() -> None:
    silent = Look(False)
    assert judged(silent, silent) == ["", ""]
    assert judged(Look(True), silent, silent, silent)[3] == (
        "the server hangs: it has not answered within 2.5 s (server.stall_timeout)"
    )
    assert judged(silent, silent, Look(True), silent, silent) == [""] * 5


def test_requests_without_a_token_for_too_long() -> None:
    assert judged(BUSY, BUSY, BUSY) == [""] * 3
    assert "runs 2 requests, and made no token within 2.5 s" in judged(BUSY, BUSY, BUSY, BUSY)[3]


@pytest.mark.parametrize(
    "other",
    [
        Look(True, running=2, generated=5, tokens=10),  # of a prompt
        Look(True, running=0, generated=5, tokens=9),
        Look(True, running=2, generated=5, tokens=9, paused=True),
    ],
)
def test_work_pauses_and_idleness_are_no_hang(other: Look) -> None:
    assert judged(BUSY, BUSY, other, BUSY, other) == [""] * 5


# ---- the leader, over a stand-in server

SERVER = textwrap.dedent("""
    import sys
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'vllm:num_requests_running 1\\nvllm:generation_tokens_total 3\\n'
            if self.path == "/is_paused":
                body = b'{"is_paused": false}'
            self.send_response(200)
            self.send_header("Content-Type", "application/json" if body[:1] == b"{" else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *_):
            pass
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
""")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "run")
    folder.begin_attempt(None, 0)
    return folder


def leader_of(run: RunFolder, monkeypatch: pytest.MonkeyPatch, problems: Any = (), **server: Any) -> Leader:
    config = RunConfig.model_validate(
        {
            "model": {"name": "m"},
            "data": {"source": "x.jsonl"},
            "trainer": {"max_completion_length": 16},
            "server": {"gpus": 0, "command": [sys.executable, "-c", SERVER], **server},
        }
    )
    write_atomic(run.run_file, dump_config(config))
    monkeypatch.setattr(main_module, "probe", lambda control: Capabilities("m"))
    monkeypatch.setattr(main_module, "check", lambda capabilities, **needs: list(problems))
    monkeypatch.setattr(main_module, "WATCH_INTERVAL_S", 0.05)
    monkeypatch.setenv(INCARNATION_ENV, "one")
    return Leader(run, config, 1)


def record_of(run: RunFolder) -> dict[str, Any]:
    return read_json(run.exit_file("server-0", "one")) or {}


def test_a_server_that_hangs_is_ended_by_its_leader(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leader_of(run, monkeypatch, stall_timeout=0.5).lead() == 1
    record = record_of(run)
    assert "runs 1 requests, and made no token within 0.5 s (server.stall_timeout)" in record["reason"]
    assert (record["final"], record["job"]) == (False, True)
    assert not run.endpoint_file().exists()
    assert (read_json(run.heartbeat_file("server-0")) or {})["progress"] == 3


def test_a_leader_whose_place_another_job_has_taken_ends_itself(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run.assignment_file, {"attempt": 1, "server": "one", "learner": "l"})
    leader = leader_of(run, monkeypatch)
    ended: list[int] = []
    leading = threading.Thread(target=lambda: ended.append(leader.lead()))
    leading.start()
    while run.endpoint(1) is None:
        assert leading.is_alive()
    write_json(run.endpoint_file(), {"url": "http://elsewhere", "incarnation": "two", "attempt": 1})
    write_json(run.assignment_file, {"attempt": 2, "server": "two", "learner": "k"})
    leading.join(30)
    assert ended == [0]
    assert record_of(run)["reason"] == "replaced by another job"
    assert (run.endpoint(2) or {})["incarnation"] == "two", "that one's address stays"


def test_one_that_was_replaced_before_it_was_up_ends_too(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(run.assignment_file, {"attempt": 1, "server": "two", "learner": "l"})
    leader = leader_of(run, monkeypatch, command=[sys.executable, "-c", "import time; time.sleep(600)"])
    assert leader.lead() == 0
    assert record_of(run)["reason"] == "replaced by another job"


def test_what_another_start_would_not_mend_is_final(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert leader_of(run, monkeypatch, problems=["no --max-logprobs 20"]).lead() == 1
    record = record_of(run)
    assert record["final"]
    assert "not what the run needs: no --max-logprobs 20" in record["reason"]


def test_only_its_own_word_is_withdrawn(run: RunFolder) -> None:
    write_json(run.endpoint_file(), {"url": "u", "incarnation": "two", "attempt": 1})
    withdraw_endpoint(run, "one")
    assert run.endpoint(1)
    withdraw_endpoint(run, "two")
    withdraw_endpoint(run, "two")
    assert run.endpoint(1) is None
