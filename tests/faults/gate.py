"""How far requests may come while a test does something to their engines."""

from __future__ import annotations

from pathlib import Path


class Gate:
    """Read by the engine cores of a test (``tests/fork_server.py``); open until it is told otherwise.

    A request that is held stays with its engine, which goes on with others and answers whoever asks.

    Args:
        path: of a file that is not there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def hold_at(self, num_tokens: int) -> None:
        """Let no request have more output tokens than this."""
        self._write(f"{num_tokens} inf")

    def let_end(self, num_requests: int) -> None:
        """Let so many requests end from now on, and a few more if they do in one step; each core counts its own."""
        self._write(f"inf {num_requests}")

    def open(self) -> None:
        """Let all go on."""
        self._path.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        # Another file each time: that is how cores see that it has changed.
        beside = self._path.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self._path)
