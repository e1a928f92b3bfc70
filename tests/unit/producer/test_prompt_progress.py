"""The progress bar of a list of prompts."""

from __future__ import annotations

import io
import re
import sys

import pytest

from penstock.producer.blocking.progress import PromptProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_has_tqdms_form(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with PromptProgress(2, True) as progress:
        progress.advance()
        progress.advance()
    *_, last = terminal.getvalue().split("\r")
    times = r"\[\d\d:\d\d<00:00, \d+\.\d\dit/s, est\. speed input: 0\.00 toks/s, .*\]"
    pattern = r"Processed prompts: 100%\|█{30}\| 2/2 " + times + r"\n"
    assert re.fullmatch(pattern, last)


@pytest.mark.parametrize(("stream", "use_tqdm"), [(io.StringIO(), True), (Terminal(), False)])
def test_nothing_is_drawn_into_a_file_or_unasked(
    stream: io.StringIO, use_tqdm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with PromptProgress(1, use_tqdm) as progress:
        progress.advance()
    assert stream.getvalue() == ""
