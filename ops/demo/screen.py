"""Output of the demo: answers that grow side by side, a progress line, and a summary."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

ROWS_SHOWN = 12


class Screen(Protocol):
    """Output of the demo, implemented for terminals, and for pipes and CI logs."""

    def __enter__(self) -> Screen: ...
    def __exit__(self, *error: object) -> None: ...
    def token(self, number: int, prompt: str, text: str) -> None:
        """Show a piece of the answer to question ``number``."""
        ...

    def end(self, number: int, prompt: str, answer: str, correct: bool) -> None:
        """Show the complete answer to question ``number``."""
        ...


def make_screen(console: Console, total: int) -> Screen:
    """Return the live screen for a terminal, else one with plain lines."""
    return LiveScreen(console, total) if console.is_terminal else PlainScreen(console, total)


class LiveScreen:
    """Screen on which running answers grow in place. Finished ones scroll up above a progress bar."""

    def __init__(self, console: Console, total: int) -> None:
        self._running: dict[int, Text] = {}
        self._progress = Progress(
            TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens")
        )
        self._task = self._progress.add_task("answered", total=total, tokens=0)
        self._num_tokens = 0
        self._live = Live(self._render(), console=console, refresh_per_second=20)

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.update(self._render())
        self._live.__exit__(None, None, None)

    def token(self, number: int, prompt: str, text: str) -> None:
        line = self._running.setdefault(number, Text(prompt, style="dim"))
        line.append(text, style="bold not dim cyan")
        self._num_tokens += 1
        self._progress.update(self._task, tokens=self._num_tokens)
        self._live.update(self._render())

    def end(self, number: int, prompt: str, answer: str, correct: bool) -> None:
        self._running.pop(number, None)
        mark = Text("✓ ", style="green") if correct else Text("✗ ", style="red")
        self._live.console.print(mark + Text(f"{prompt} ", style="dim") + Text(answer))
        self._progress.advance(self._task)
        self._live.update(self._render())

    def _render(self) -> RenderableType:
        rows = list(self._running.values())[:ROWS_SHOWN]
        return Group(*rows, self._progress)


class PlainScreen:
    """Output with one line per piece, so that a log shows how the answers interleave."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def token(self, number: int, prompt: str, text: str) -> None:
        self._console.print(f"[{number:>3}] … {text.strip()}", markup=False, highlight=False, soft_wrap=True)

    def end(self, number: int, prompt: str, answer: str, correct: bool) -> None:
        self._done += 1
        verdict = "right" if correct else "WRONG"
        line = f"[{number:>3}] {verdict} ({self._done}/{self._total}): {prompt} {answer}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
