"""A receiver of spans inside the test: OTLP over HTTP, decoded by OpenTelemetry's own messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.shared.tracing.provider import CLOSING_THREAD

from .processes import DEADLINE_S


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came. Ids are hexadecimal; times are nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    started_ns: int
    ended_ns: int
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    links: tuple[tuple[str, str, dict[str, Any]], ...]


class OtlpReceiver:
    """Receiver that keeps all spans while the ``with`` block lasts. A test may make it hang, or refuse."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.headers: list[dict[str, str]] = []
        self.num_refused = 0
        self.num_hanging = 0
        self._is_refusing = False
        self._lets_pass = threading.Event()
        self._lets_pass.set()
        self._came = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def hang(self) -> None:
        """Answer no request, until the end."""
        self._lets_pass.clear()

    def refuse(self) -> None:
        """Answer everybody that this cannot be, until ``accept``."""
        self._is_refusing = True

    def accept(self) -> None:
        self._is_refusing = False

    def wait(self, is_there: Callable[[], object]) -> None:
        """Return once a condition holds for the received spans. Raises ``TimeoutError`` if it never does."""
        with self._came:
            if not self._came.wait_for(is_there, DEADLINE_S):
                raise TimeoutError(f"there are but {[span.name for span in self.spans]}")

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Return the spans of a trace, in the order in which they began."""
        with self._came:
            return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.started_ns)

    def __enter__(self) -> OtlpReceiver:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lets_pass.set()
        _await_exporters()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, body: bytes, headers: dict[str, str]) -> bool:
        """Return whether it is taken."""
        if not self._lets_pass.is_set():
            with self._came:
                self.num_hanging += 1
                self._came.notify_all()
            self._lets_pass.wait()
        with self._came:
            if self._is_refusing:
                self.num_refused += 1
            else:
                self.spans += spans_of(ExportTraceServiceRequest.FromString(body))
                self.headers.append(headers)
            self._came.notify_all()
            return not self._is_refusing

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                is_taken = self.path == "/v1/traces" and take(body, dict(self.headers))
                self.send_response(200 if is_taken else 400)
                self.send_header("content-length", "0")
                try:
                    self.end_headers()
                except OSError:  # who was left hanging has gone
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        return Handler


def _await_exporters() -> None:
    """Wait for providers of this process that were closed and have spans yet to send.

    Each tries again with a delay that it draws from ``random``: during the next test, in which hypothesis watches that.
    """
    for thread in threading.enumerate():
        if thread.name == CLOSING_THREAD:
            thread.join()


def spans_of(message: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    """Return the spans of a message."""
    return [
        ReceivedSpan(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            service=_plain(resource.resource.attributes).get("service.name", ""),
            started_ns=span.start_time_unix_nano,
            ended_ns=span.end_time_unix_nano,
            kind=span.kind,
            is_error=span.status.code == span.status.STATUS_CODE_ERROR,
            attributes=_plain(span.attributes),
            links=tuple((link.trace_id.hex(), link.span_id.hex(), _plain(link.attributes)) for link in span.links),
        )
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def picture(spans: Sequence[ReceivedSpan], width: int = 48) -> str:
    """Draw a trace: a line for each span below its parent, with its time and its links."""
    start, end = min(span.started_ns for span in spans), max(span.ended_ns for span in spans)
    ids = {span.span_id for span in spans}
    scale = width / max(1, end - start)
    names = {span.span_id: number for number, span in enumerate(spans, start=1)}
    lines: list[str] = []

    def draw(span: ReceivedSpan, depth: int) -> None:
        first = int((span.started_ns - start) * scale)
        length = max(1, round((span.ended_ns - span.started_ns) * scale))
        bar = (" " * min(first, width - 1) + "█" * length)[:width]
        facts = [f"{label} {value}" for label, value in _facts(span)]
        facts += [f"→ {names[link]}" for _, link, _ in span.links if link in names]
        title = f"{names[span.span_id]} {'  ' * depth}{span.name}"
        milliseconds = (span.ended_ns - span.started_ns) / 1e6
        lines.append(f"{title:<30} {milliseconds:>7.1f} ms ▏{bar:<{width}}▕ {', '.join(facts)}".rstrip())
        for child in spans:
            if child.parent_id == span.span_id:
                draw(child, depth + 1)

    for span in spans:
        if span.parent_id not in ids:
            draw(span, 0)
    return "\n".join(lines)


def _facts(span: ReceivedSpan) -> list[tuple[str, Any]]:
    attributes = {
        "http.response.status_code": "status",
        "penstock.attempt": "attempt",
        "penstock.attempt.outcome": "outcome",
        "penstock.attempt.first_token_index": "from token",
        "penstock.attempt.next_token_index": "to",
    }
    return [(label, span.attributes[name]) for name, label in attributes.items() if name in span.attributes]
