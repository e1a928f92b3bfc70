"""Exceptions of Python, of warnings the base alone, and two of libraries, for tests that none ends a worker."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable
from typing import Any, NoReturn


class Panic(BaseException):
    """The exception that pyo3 raises for a panic in Rust."""


class Mute(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not even that")


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "UnicodeDecodeError": ("utf-8", b"\xff", 0, 1, "reason"),
    "UnicodeEncodeError": ("utf-8", "\ud800", 0, 1, "reason"),
    "UnicodeTranslateError": ("a", 0, 1, "reason"),
    "ExceptionGroup": ("group", [ValueError("inner")]),
    "BaseExceptionGroup": ("group", [SystemExit("inner")]),
}
EVERY_EXCEPTION: list[type[BaseException]] = [
    # Of warnings the base alone: nothing tells the others apart.
    *{
        kind
        for kind in vars(builtins).values()
        if isinstance(kind, type) and issubclass(kind, BaseException) and Warning not in kind.__bases__
    },
    asyncio.CancelledError,
    Panic,
    Mute,
]
EVERY_EXCEPTION.sort(key=lambda kind: kind.__name__)


def raising(kind: type[BaseException]) -> Callable[..., NoReturn]:
    """Return a function that raises ``kind``, whatever it is called with."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise kind(*_ARGUMENTS.get(kind.__name__, ("on purpose",)))

    return fail


def name_of(kind: type[BaseException]) -> str:
    """Return the id of a test's parameter."""
    return kind.__name__
