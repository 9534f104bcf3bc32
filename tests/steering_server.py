"""A double of the routes that steer a server, to count the calls that arrive behind a `FaultProxy`."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWERS = {
    "/is_paused": b'{"is_paused": true}',
    "/get_world_size": b'{"world_size": 1}',
    "/weight_info": b'{"weight_version": "run/a1/3"}',
}


class SteeringServer:
    """`with`; on a free port. `calls` are the paths that were asked for; `refused` maps a path to a status; `open` says
    whether a delivery is open, which /finish_weight_update closes or complains about as vLLM does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refused: dict[str, int] = {}
        self.open = False
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.partition("?")[0]
                owner.calls.append(path)
                status, body = owner.refused.get(path, 200), ANSWERS.get(path, b'{"done": true}')
                if path == "/finish_weight_update" and path not in owner.refused:
                    status, body = owner.finish()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer

            def log_message(self, *_: Any) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def finish(self) -> tuple[int, bytes]:
        if not self.open:
            return 500, b'{"error": "finish_weight_update called without a matching start_weight_update."}'
        self.open = False
        return 200, b'{"message": "finished"}'

    def __enter__(self) -> "SteeringServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
