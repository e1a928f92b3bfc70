"""Logs of Penstock's own processes: one line per event on standard error, pretty on a terminal, JSON elsewhere.

An event is a name in snake_case, which programs search for; ops/guide/reference/logs.md lists all events. Further facts
are in fields. People read the name with spaces in it.

Only commands and our processes call ``configure_logging``; a web app that imports the client keeps its own set-up.
There the lines of ``get_logger`` go through the standard library's ``logging``, below the logger ``penstock``, and
nowhere else. Records of other libraries go through the same renderer, so their lines look like ours.
"""

from __future__ import annotations

import argparse
import io
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from ..errors import ConfigurationError
from ..values.shown import mask_text, shown

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("auto", "pretty", "json")

MAX_ERROR_CHARS = 300
_last_error: tuple[str, float] = ("", 0.0)
_options: tuple[str, ...] = ()

# Attributes of a record that logging itself sets, or refuses to take from others.
_RESERVED = {*vars(logging.makeLogRecord({})), "message", "asctime"}
# Frames of structlog between the caller of a logger's method and logging.
_NUM_STRUCTLOG_FRAMES = 3

_EVENT = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--log-level`` and ``--log-format``, for ``configure_logging``."""
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    parser.add_argument("--log-format", choices=FORMATS, default="auto")


def configure_logging(level: str = "info", fmt: str = "auto", stream: TextIO | None = None) -> None:
    """Send structlog's and the standard library's records to ``stream``; calling it again replaces the first call.

    Variables bound with ``structlog.contextvars`` (``request_id``, ``engine_id``) appear in every record.

    Args:
        level: one of ``LEVELS``; records below it are dropped before they are formatted.
        fmt: "pretty", "json", or "auto": pretty when ``stream`` is a terminal.
        stream: standard error when None.

    Raises:
        ConfigurationError: ``level`` or ``fmt`` is unknown.
    """
    if level not in LEVELS:
        raise ConfigurationError(f"log level must be one of {', '.join(LEVELS)}, got {shown(level)}")
    if fmt not in FORMATS:
        raise ConfigurationError(f"log format must be one of {', '.join(FORMATS)}, got {shown(fmt)}")
    global _options  # of the process, as its log is
    _options = ("--log-level", level, "--log-format", fmt)
    target = sys.stderr if stream is None else stream
    pretty = fmt == "pretty" or (fmt == "auto" and target.isatty())
    # structlog's part before a record reaches logging is the same for every format; everything else happens in the
    # handler, once, for both kinds of record. Loggers are not cached: lines are rare, and a cached one would not follow
    # a second call, or a test that listens.
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            _note_error,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    handler = _PenstockStream(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.StackInfoRenderer(),
                *(_pretty(target.isatty()) if pretty else _json_processors()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [*(h for h in root.handlers if not isinstance(h, _PenstockStream)), handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def get_logger(name: str) -> Any:
    """Return the logger of a module that may be part of an app: ``get_logger(__name__)``.

    After ``configure_logging`` its records are written as that says. In any other process they are ordinary records of
    ``logging``: the message has the event and its fields, and the fields are attributes of the record, too.
    """
    return structlog.wrap_logger(
        logging.getLogger(name), processors=PROCESSORS, wrapper_class=structlog.stdlib.BoundLogger
    )


def _hand_over(logger: WrappedLogger, method: str, record: EventDict) -> Any:
    if any(isinstance(handler, _PenstockStream) for handler in logging.getLogger().handlers):
        return structlog.stdlib.ProcessorFormatter.wrap_for_formatter(logger, method, record)
    event = record.pop("event")
    options = {name: record.pop(name) for name in ("exc_info", "stack_info") if name in record}
    fields = _mask_urls(logger, method, record)
    words = [str(event), *(f"{name}={shown(value)}" for name, value in fields.items())]
    extra = {f"{name}_" if name in _RESERVED else name: value for name, value in fields.items()}
    return {"msg": " ".join(words), "extra": extra, "stacklevel": _NUM_STRUCTLOG_FRAMES + 1, **options}


def log_options() -> tuple[str, ...]:
    """Return the options of ``add_log_arguments`` by which another process logs as this one does."""
    return _options


def last_error() -> tuple[str, float]:
    """Return the last error that this process has logged, as event and reason, and its Unix time; "" and 0 without."""
    return _last_error


def _note_error(_logger: WrappedLogger, method: str, record: EventDict) -> EventDict:
    global _last_error  # of the process, as its log is
    if method in ("error", "critical", "exception"):
        reason = record.get("error") or record.get("reason") or record.get("finding") or ""
        words = f"{str(record.get('event', '')).replace('_', ' ')}{f': {reason}' if reason else ''}"
        _last_error = (words[:MAX_ERROR_CHARS], time.time())
    return record


def log_ids(
    request_id: str | None = None, external_req_id: str | None = None, trace_headers: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the ids of a request for a log line, the same in every process, so that one search finds all of them.

    ``request_id`` is ours, ``x_request_id`` the caller's, ``trace_id`` that of its trace. Missing ids are left out, and
    so is a trace that is not a W3C ``traceparent``.
    """
    trace = _TRACE_PARENT.fullmatch((trace_headers or {}).get("traceparent", ""))
    ids = {"request_id": request_id, "x_request_id": external_req_id, "trace_id": trace and trace.group(1)}
    return {name: value for name, value in ids.items() if value}


# Of the loggers of ``get_logger``, whatever the app has configured structlog to do.
PROCESSORS: list[Processor] = [
    structlog.stdlib.filter_by_level,
    _note_error,
    structlog.stdlib.PositionalArgumentsFormatter(),
    _hand_over,
]
# Without it logging writes warnings to standard error in an app that has configured nothing.
logging.getLogger("penstock").addHandler(logging.NullHandler())


class _PenstockStream(logging.StreamHandler[TextIO]):
    """Our handler, distinguished by its type from those of a test runner or an embedding program."""


def _pretty(colors: bool) -> list[Processor]:
    # Plain tracebacks: rich's, taken by default where rich is installed, print local variables, prompts included.
    def plain(stream: TextIO, exc_info: Any) -> None:
        buffer = io.StringIO()
        structlog.dev.plain_traceback(buffer, exc_info)
        stream.write(mask_text(buffer.getvalue()))

    return [
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        _name_as_words,
        _mask_urls,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain),
    ]


def _name_as_words(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
    """Write our events with spaces, for people; records of other libraries do not change."""
    if isinstance(event := record.get("event"), str) and _EVENT.fullmatch(event):
        record["event"] = event.replace("_", " ")
    return record


def _mask_urls(_logger: WrappedLogger, _method: str, record: EventDict) -> EventDict:
    """Mask the passwords of URLs. Other libraries log them: those that export spans or speak HTTP."""
    for name, value in record.items():
        if isinstance(value, str):
            record[name] = mask_text(value)
    return record


def _json_processors() -> list[Processor]:
    return [
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _mask_urls,
        structlog.processors.JSONRenderer(),
    ]
