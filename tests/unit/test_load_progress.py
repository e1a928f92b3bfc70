"""What `penstock run` and the demo show while a worker loads a model."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from penstock.ops.local.load_progress import LoadProgress, step_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def log_of(*events: Any) -> str:
    return "".join(f"{json.dumps(event)}\n" for event in events)


WAITING = {"event": "start_waits_for_engines"}


@pytest.mark.parametrize(
    ("log", "step"),
    [
        ("", "starting the engine"),
        (log_of({"event": "core_started"}, WAITING), "reading the file"),
        (
            log_of({"event": "model_downloading", "num_bytes": 12_300_000, "total_bytes": 93_000_000}),
            "downloading, 12 of 93 MB",
        ),
        (log_of({"event": "native_kernels_compiling"}, WAITING), "compiling kernels for this processor"),
        (log_of({"event": "native_kernels"}), "reading the weights"),
        (log_of({"event": "forward_mode"}, WAITING, 5) + "no JSON\n", "checking the results"),
        (log_of({"event": "core_started"}) + '{"event": "forward_mode"', "reading the file"),
    ],
)
def test_the_last_event_of_the_log_gives_the_step(log: str, step: str) -> None:
    assert step_of(log) == step


def test_each_step_is_a_line_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with LoadProgress(out) as progress:
        for log in ("", "", log_of({"event": "native_kernels"}), log_of({"event": "native_kernels"}, WAITING)):
            progress.update(log)
    assert out.getvalue() == "starting the engine …\nreading the weights …\n"


def test_a_terminal_has_one_line_which_is_removed() -> None:
    out = Terminal()
    with LoadProgress(out) as progress:
        progress.update("")
        progress.update(log_of({"event": "native_kernels"}))
        assert "\n" not in out.getvalue()
        assert "\r\x1b[Kstarting the engine … " in out.getvalue()
        assert "\r\x1b[Kreading the weights … " in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")
