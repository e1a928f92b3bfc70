"""A receiver of webhooks as a user writes it: verifies each with the library of Standard Webhooks, drops repeats."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from standardwebhooks import Webhook

Answer = tuple[int, dict[str, str]]


class Receiver:
    """Listens on a port of its own; ``answers`` says what a path answers, 204 otherwise.

    ``seen`` counts POSTs by path and webhook-id, ``events`` has what they said by id. A signature that does not hold is
    answered with 401 and in neither. What comes to ``/held`` is answered when ``released`` is set.
    """

    def __init__(self) -> None:
        self.secret = ""
        self.answers: dict[str, Answer] = {}
        self.released = threading.Event()
        self.seen: dict[str, Counter[str]] = {}
        self.events: dict[str, dict[str, Any]] = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status, headers = receiver._take(self.path, body, dict(self.headers))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Tests look at what was received instead."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self._server.server_port}{path}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _take(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        try:
            event = Webhook(self.secret).verify(body, headers)
        except Exception as error:
            return 401, {"x-why": repr(error)}
        event_id = headers["webhook-id"]
        assert event["id"] == event_id
        self.seen.setdefault(path, Counter())[event_id] += 1
        assert self.events.setdefault(event_id, event) == event
        if path == "/held":
            self.released.wait()
        return self.answers.get(path, (204, {}))
