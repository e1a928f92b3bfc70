"""The gate limits the progress of requests while a test does something to their engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# As in `fork_server.py` next to this file, which is a program.
_VARIABLE = "PENSTOCK_TEST_GATE"


class Gate:
    """Limit that the engine cores of a test read (``tests/fork_server.py``); open until a test closes it.

    A request that is held stays with its engine, which continues with others and answers every question.

    Args:
        folder: of its file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gate"

    @contextmanager
    def for_engines(self) -> Iterator[None]:
        """Workers that are started inside, and every core they start, heed this gate."""
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = str(self._path)
        try:
            yield
        finally:
            del os.environ[_VARIABLE]
            if before is not None:
                os.environ[_VARIABLE] = before

    def hold_at(self, num_tokens: int) -> None:
        """Let no request have more output tokens than this."""
        self._write(f"{num_tokens} inf 0")

    def keep_in_flight(self) -> None:
        """Let engines of stages launch a batch for each, and then none of them land."""
        self._write("inf inf 1")

    def keeps_flights_of(self, core_pid: int) -> bool:
        """Whether that engine core has a batch in flight for each of its stages, and waits."""
        return self._path.with_name(f"{self._path.name}.flying-{core_pid}").exists()

    def let_end(self, num_requests: int) -> None:
        """Let this many requests end from now on, and a few more if they do in one step; each core counts its own."""
        self._write(f"inf {num_requests} 0")

    def open(self) -> None:
        """Let all go on."""
        self._path.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        # Another file each time: that is how cores see that it has changed.
        beside = self._path.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self._path)
