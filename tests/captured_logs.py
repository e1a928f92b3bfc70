"""Log lines of a test as dictionaries, those of ``shared.log.get_logger`` and those of structlog's own loggers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from structlog.testing import LogCapture
from structlog.typing import EventDict

from penstock.shared.process import log


@contextmanager
def capture_logs() -> Iterator[list[EventDict]]:
    """Collect log events, as ``structlog.testing.capture_logs`` does for loggers that it knows."""
    capture = LogCapture()
    places = (log.PROCESSORS, structlog.get_config()["processors"])
    before = [[*processors] for processors in places]
    for processors in places:
        processors[:] = [capture]
    try:
        yield capture.entries
    finally:
        for processors, old in zip(places, before, strict=True):
            processors[:] = old
