"""Progress bar of a batch on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from ....producer.batches import OnProgress, Tally


@contextlib.contextmanager
def row_bar() -> Iterator[OnProgress]:
    """Draw a progress bar on standard error, if that is a terminal. Yields a function to call after each row."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    # Imported here, because only this command needs rich, and not every installation has it.
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        sys.stderr.write("for a progress bar: pip install 'penstock[cli]'\n")
        yield lambda _: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("rows", total=None, note="")

        def draw(tally: Tally) -> None:
            note = f"{tally.failed} failed" if tally.failed else ""
            total = len(tally.is_done)
            progress.update(bar, total=total, completed=tally.completed + tally.failed, note=note)

        yield draw
