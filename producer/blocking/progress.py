"""Progress of a list of prompts, as tqdm shows it, without a need for tqdm."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from ..results import RequestOutput

DESCRIPTION = "Processed prompts"
WIDTH = 30
REDRAW_S = 0.1


class Bar(Protocol):
    """A progress bar with tqdm's interface."""

    postfix: Any

    def update(self, n: int, /) -> object:
        """Count ``n`` more items."""
        ...

    def close(self) -> object:
        """End the bar's line."""
        ...


# True for a bar on standard error, False for none, or a class with tqdm's interface.
UseTqdm = bool | Callable[..., Bar]


class PromptProgress:
    """Counts finished prompts and their tokens on a bar, which is closed at the end of the ``with`` block.

    Args:
        total: number of prompts.
        use_tqdm: which bar: True for a ``TextBar``, False for none, or a class such as ``tqdm``.
    """

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        self._num_input = self._num_output = 0
        self._started = time.monotonic()
        self._bar: Bar | None = None
        if use_tqdm:
            make = TextBar if use_tqdm is True else use_tqdm
            self._bar = make(total=total, desc=DESCRIPTION, dynamic_ncols=True, postfix=self._speed())

    def advance(self) -> None:
        """Count a finished prompt."""
        if self._bar is not None:
            self._bar.update(1)

    def advance_by(self, output: RequestOutput) -> None:
        """Count a finished prompt, and its tokens and those of its answers."""
        self._num_input += output.usage.num_prompt_tokens if output.usage is not None else 0
        self._num_output += sum(len(answer.token_ids) for answer in output.outputs)
        if self._bar is not None:
            self._bar.postfix = self._speed()
            self._bar.update(1)

    def __enter__(self) -> PromptProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def _speed(self) -> str:
        elapsed_s = max(time.monotonic() - self._started, 1e-9)
        speeds = self._num_input / elapsed_s, self._num_output / elapsed_s
        return "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*speeds)


class TextBar:
    """A bar in tqdm's form on standard error. Draws only on a terminal or in a notebook."""

    def __init__(self, *, total: int, desc: str, postfix: str, **_: object) -> None:
        self.postfix = postfix
        self._total = total
        self._desc = desc
        self._shown = total > 0 and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._done = 0
        self._started = time.monotonic()
        self._drawn_at = 0.0

    def update(self, n: int, /) -> None:
        """Count ``n`` more items."""
        self._done += n
        now = time.monotonic()
        if self._shown and (now - self._drawn_at > REDRAW_S or self._done == self._total):
            self._drawn_at = now
            sys.stderr.write(f"\r{self._line(now - self._started)}")
            sys.stderr.flush()

    def close(self) -> None:
        """End the bar's line."""
        if self._shown and self._done:
            sys.stderr.write("\n")

    def _line(self, elapsed_s: float) -> str:
        share = self._done / self._total
        bar = "█" * int(WIDTH * share)
        rate = self._done / elapsed_s if elapsed_s else 0.0
        left = _clock((self._total - self._done) / rate) if rate else "?"
        return (
            f"{self._desc}: {share:4.0%}|{bar:<{WIDTH}}| {self._done}/{self._total} "
            f"[{_clock(elapsed_s)}<{left}, {rate:.2f}it/s, {self.postfix}]"
        )


def _clock(duration_s: float) -> str:
    minutes, seconds = divmod(int(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
