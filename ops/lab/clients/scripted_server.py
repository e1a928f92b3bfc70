"""A server with the endpoints of llama-server, whose answers come from a function of the prompt's text and the schema.

``worker start --engine http`` uses it as an engine. A resumed request sends the delivered tokens as part of its prompt,
and gets the rest of the same answer.
"""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tokenizers import Tokenizer

from .model_folder import TURN_END, TURN_START

NUM_SLOTS, SLOT_TOKENS = 4, 1_000_000
TOKENS_PER_EVENT = 4
_ASSISTANT = f"{TURN_START}assistant\n"

Answer = Callable[[str, dict[str, Any] | None], str]


class ScriptedServer:
    """The server, in a thread of this process.

    Args:
        answer: returns the whole answer. Its arguments are the text of the prompt, which ends where the answer begins,
            and the JSON schema of the answer, None for any text.
    """

    def __init__(self, tokenizer: Tokenizer, answer: Answer) -> None:
        self.tokenizer = tokenizer
        self.answer = answer
        # Set while the next stream must stop after its first tokens; and once it has.
        self.hold, self.is_held = threading.Event(), threading.Event()
        owner = self

        class Handler(_Handler):
            server_state = owner

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """Address for ``--engine-url``."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def shut_down(self) -> None:
        """Stop the server."""
        self._http.shutdown()
        self._http.server_close()

    def rest_of_answer(self, token_ids: list[int], schema: dict[str, Any] | None) -> list[int]:
        """Return the tokens of the answer that the prompt ``token_ids`` does not contain yet, with the end of turn."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        before, _, delivered = text.rpartition(_ASSISTANT)
        num_delivered = len(self.tokenizer.encode(delivered).ids)
        tokens = self.tokenizer.encode(self.answer(before, schema)).ids
        end = self.tokenizer.token_to_id(TURN_END)
        assert end is not None
        return [*tokens[num_delivered:], end]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: ScriptedServer

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""

    def do_GET(self) -> None:
        """Answer the endpoints that describe the server."""
        vocab_size = self.server_state.tokenizer.get_vocab_size()
        answers = {
            "/health": {"status": "ok"},
            "/props": {"total_slots": NUM_SLOTS, "default_generation_settings": {"n_ctx": SLOT_TOKENS}},
            "/v1/models": {"data": [{"id": "scripted", "meta": {"n_vocab": vocab_size}}]},
        }
        self._send_json(answers.get(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        """Answer ``/completion``."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens, limit = self.server_state.rest_of_answer(body["prompt"], body.get("json_schema")), body["n_predict"]
        is_cut = 0 <= limit < len(tokens)
        if is_cut:
            tokens = tokens[:limit]
        ending = {"stop": True, "stop_type": "limit" if is_cut else "eos", "content": ""}
        if not body["stream"]:
            self._send_json({"tokens": tokens, "tokens_predicted": len(tokens), **ending})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for start in range(0, len(tokens), TOKENS_PER_EVENT):
            part = tokens[start : start + TOKENS_PER_EVENT]
            num_sent = start + len(part)
            event: dict[str, Any] = {"tokens": part, "tokens_predicted": num_sent, "stop": False, "content": ""}
            if num_sent == len(tokens):
                event |= ending
            self.wfile.write(b"data: %b\n\n" % json.dumps(event).encode())
            self.wfile.flush()
            if start == 0 and self.server_state.hold.is_set() and num_sent < len(tokens):
                self._wait_until_closed()
                return
        self.close_connection = True

    def _wait_until_closed(self) -> None:
        """Send nothing until the engine has closed the connection, because it was killed."""
        self.server_state.hold.clear()
        self.server_state.is_held.set()
        select.select([self.connection], [], [])
        self.close_connection = True

    def _send_json(self, answer: dict[str, Any] | None) -> None:
        data = json.dumps(answer or {}).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
