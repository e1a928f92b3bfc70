"""``--watch``: repeated output, for simple terminals and for pipes."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from ...shared.errors import RedisUnavailableError
from ..views.words import plain

DEFAULT_INTERVAL_S = 2.0
LEAST_INTERVAL_S = 0.1
# A read that takes longer is reported as unanswered; the next one tries again.
PATIENCE_S = 5.0
_TO_THE_TOP, _ERASE_LINE, _ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True)
class WatchFrame:
    """The values of one read, as a text for a screen and as one line."""

    text: str
    line: str


def add_watch_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--watch [SECONDS]``, which is None by default."""
    parser.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        help=f"show it again every {DEFAULT_INTERVAL_S:g} s, or so often, until Ctrl-C; not on a terminal, a line each",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_INTERVAL_S <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, at least {LEAST_INTERVAL_S:g}, got {text!r}")
    return seconds


async def watch(look: Callable[[], Awaitable[WatchFrame]], interval_s: float, *, in_lines: bool = False) -> None:
    """Show the result of ``look`` repeatedly, forever: redrawn in place, or as lines if the output is no terminal.

    An unreachable Redis is reported on standard error, or above the last frame.

    Args:
        in_lines: print lines on a terminal as well.
    """
    is_lines = in_lines or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb"
    show = _print_line if is_lines else _Redrawn()
    while True:
        frame, error_text = None, ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                frame = await look()
        except (RedisUnavailableError, RedisError) as error:
            error_text = str(error)
        except TimeoutError:
            error_text = f"Redis has not answered for {PATIENCE_S:g} s"
        show(frame, error_text)
        await asyncio.sleep(interval_s)


def _print_line(frame: WatchFrame | None, error_text: str) -> None:
    if frame is not None:
        print(frame.line, flush=True)
    else:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {error_text}", file=sys.stderr, flush=True)


class _Redrawn:
    """Output that draws each frame over the last one, truncated to the size of the terminal."""

    def __init__(self) -> None:
        self._text = ""
        self._read_at = ""

    def __call__(self, frame: WatchFrame | None, error_text: str) -> None:
        if frame is not None:
            self._text, self._read_at = frame.text, time.strftime("%H:%M:%S")
        head = f"{self._read_at}  {error_text}".strip() if error_text else f"{self._read_at}  Ctrl-C ends"
        width, height = shutil.get_terminal_size()
        lines = [line[:width] for line in [head, "", *plain(self._text).splitlines()][: height - 1]]
        print(_TO_THE_TOP + "".join(f"{line}{_ERASE_LINE}\n" for line in lines) + _ERASE_BELOW, end="", flush=True)
