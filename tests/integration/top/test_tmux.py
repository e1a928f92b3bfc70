"""``penstock top`` as people have it: a process in a real terminal, which is tmux."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shared.queue.lifecycle import RequestState

from ...processes import DEADLINE_S
from .conftest import Terminal

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux")


class Tmux:
    """A terminal of 80 by 24 with one program in it, on a server of its own."""

    def __init__(self, socket: Path) -> None:
        self._command = ["tmux", "-S", str(socket), "-f", "/dev/null"]

    def run(self, *words: str) -> str:
        environment = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        done = subprocess.run([*self._command, *words], capture_output=True, text=True, check=True, env=environment)
        return done.stdout

    def sees(self, *words: str) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            text = self.run("capture-pane", "-p")
            if all(word in text for word in words):
                return text
            assert time.monotonic() < deadline, f"{words} never stood in the terminal:\n{text}"
            time.sleep(0.05)


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    tmux = Tmux(tmp_path / "tmux.sock")
    yield tmux
    subprocess.run([*tmux._command, "kill-server"], capture_output=True, check=False)


async def test_it_displays_and_changes_a_deployment_and_restores_the_terminal(
    terminal: Terminal, tmux: Tmux, tmp_path: Path
) -> None:
    await terminal.park("dies")
    program = [sys.executable, "-m", "penstock.ops.cli", "top", "--namespace", terminal.keys.namespace]
    program += ["--redis-url", terminal.url, "--log-file", str(tmp_path / "log")]
    script = f"echo before; {shlex.join(program)}; echo ended with $?; exec cat"
    tmux.run("new-session", "-d", "-x", "80", "-y", "24", script)
    tmux.sees("penstock top", "MODEL", "1 Models")
    tmux.run("send-keys", "5")
    tmux.sees("dies", "killed by signal 11")
    tmux.run("send-keys", "r")
    tmux.sees("queue request dies again, from its prompt?")
    tmux.run("send-keys", "y")
    tmux.sees("dies is queued again", "0 parked")
    assert await terminal.broker.state("dies") is RequestState.QUEUED
    tmux.run("send-keys", "q")
    text = tmux.sees("before", "ended with 0")
    assert "MODEL" not in text
    assert (tmp_path / "log").read_text() == ""
    (entry,) = await terminal.entries()
    assert (entry.action, entry.via) == ("dead.replay", "top")
