"""The double of the server: a leader, and an HTTP server that generates once weights were delivered.

What it knows (the label, the newest attempt) is gone when its process dies, as the real one's weights are.
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from slipstream.process import REPLACED, how_ended, spawn, stop
from slipstream.run_folder import RunFolder, read_json, write_json
from tests.doubles.events import event, identify
from tests.doubles.jobs import LOOK_S, Leader, host, node_rank
from tests.doubles.remote import Server, ServerGone

GRACE_S = 2.0


class State:
    """What the server holds in memory."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.token = run.token_file.read_text().strip()
        self.lock = threading.Lock()
        self.label = ""
        self.attempt = 0
        self.paused = False
        self.generated = 0

    def answer(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if route == "/health":
            return 200, {"label": self.label, "generated": self.generated}
        if route in ("/begin_delivery", "/finish_delivery"):
            return self._delivery(route, body)
        if route == "/generate":
            return self._generate(body)
        return 404, {}

    def _delivery(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        event(self.run, "server" + route.replace("/", ".").replace("_delivery", ""), label=body["label"])
        with self.lock:
            if body["attempt"] < self.attempt:
                return 409, {"error": f"weights of attempt {body['attempt']}, attempt {self.attempt} delivers already"}
            self.attempt = body["attempt"]
            self.paused = route == "/begin_delivery"
            self.label = "torn" if self.paused else body["label"]
            return 200, {}

    def _generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        event(self.run, "server.generate", number=body["number"])
        with self.lock:
            if not self.label or self.paused:
                return 503, {"error": "no weights"}
            label = self.label
            self.generated += 4 * int(body["n"])
        time.sleep((int(body["number"]) * 7919 % 40) / 1000)
        return 200, {"label": label, "tokens": [[1, 2, 3, 4]] * int(body["n"])}


def handler(state: State) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = self.headers.get("Authorization") == f"Bearer {state.token}"
            code, value = state.answer(self.path, body) if known else (401, {})
            text = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    return Handler


def serve(run: RunFolder, address: Path) -> None:
    server = ThreadingHTTPServer((host(), 0), handler(State(run)))
    server.daemon_threads = True
    write_json(address, {"url": f"http://{host()}:{server.server_address[1]}"})
    server.serve_forever()


def run(run_dir: str | Path, attempt: int) -> int:
    """Lead the double of the server: `slipstream.serving.main:run`."""
    who = f"server-{node_rank()}"
    leader = Leader(run_dir, attempt, "server", who, beats=True)
    folder, incarnation = leader.run, leader.incarnation
    identify(who=who, attempt=attempt, node=node_rank())
    event(folder, "server.start")
    address = folder.meeting_file(f"{incarnation}-{node_rank()}")
    command = [sys.executable, "-m", "tests.doubles.server", str(folder.path), str(attempt), str(address)]
    child = spawn(command, leader.log, leader.environment)
    try:
        while child.poll() is None and not address.exists() and not leader.terms:
            time.sleep(LOOK_S)
        if node_rank() == 0 and address.exists():
            url = (read_json(address) or {})["url"]
            endpoint = {"url": url, "incarnation": incarnation, "attempt": attempt, "model": "double"}
            write_json(folder.endpoint_file(), {**endpoint, "authenticated": True, "capabilities": {}})
            leader.beat.update(phase="serving", url=url)
            event(folder, "server.ready")
        answered, stall_s = time.monotonic(), leader.config.server.stall_timeout
        stalled = False
        while child.poll() is None and not leader.terms and not leader.leaving and not leader.replaced:
            if node_rank() > 0 or _measure(leader):
                answered = time.monotonic()
            if stalled := time.monotonic() - answered > stall_s:
                break
            time.sleep(LOOK_S)
        ended = f"has not answered for {stall_s:g} s" if stalled else f"ended {how_ended(child.poll())}"
    finally:
        stop(child, GRACE_S)
    if leader.terms or leader.leaving:
        return leader.end(0, f"stopped by {leader.terms[-1] if leader.terms else leader.leaving}")
    if leader.replaced:
        return leader.end(1, REPLACED)
    return leader.end(1, f"the server {ended}")


def _measure(leader: Leader) -> bool:
    """Whether the server answers. Progress is what it has generated."""
    endpoint = read_json(leader.run.endpoint_file()) or {}
    if endpoint.get("incarnation") != leader.incarnation:
        return True
    try:
        health = Server(leader.run, endpoint, timeout_s=1.0).call("/health", {})
    except ServerGone:
        return False
    leader.beat.update(progress=health["generated"])
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("attempt", type=int)
    parser.add_argument("address", type=Path)
    arguments = parser.parse_args()
    identify(who="server-process", attempt=arguments.attempt, node=node_rank(), leader=os.getppid())
    serve(RunFolder.open(arguments.run_dir), arguments.address)


if __name__ == "__main__":
    main()
