"""A server that a core starts ends with its core, and its last words are told."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from penstock.worker.other_engines.http.launcher import LaunchedServer

from ...processes import DEADLINE_S

pytestmark = pytest.mark.slow
# Starts another process, tells both ids, and stays.
SERVER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(1000)
"""


Family = tuple[LaunchedServer, list[psutil.Process]]


@pytest.fixture
def family(tmp_path: Path) -> Family:
    """Return a running engine, its process and the one that it has started."""
    path = tmp_path / "pids"
    server = LaunchedServer([sys.executable, "-S", "-c", SERVER, str(path)])
    deadline = time.monotonic() + 60
    while not path.exists():
        assert server.ended() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return server, [psutil.Process(int(pid)) for pid in path.read_text().split()]


def test_it_ends_in_order_with_all_it_has_started(family: Family) -> None:
    server, processes = family
    server.close()
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert alive == []


def test_it_ends_when_its_keeper_is_killed(family: Family) -> None:
    server, processes = family
    keeper = processes[0].parent()
    assert keeper is not None
    keeper.kill()
    psutil.wait_procs(processes[:1], timeout=DEADLINE_S)
    assert not processes[0].is_running()
    assert server.ended() is not None
    processes[1].kill()


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["sh", "-c", "echo no such model >&2; exit 7"], "sh ended with status 7; its last words: no such model"),
        (["sh", "-c", "kill -9 $$"], "sh ended by signal 9; its last words: none"),
        (["/no/such/server"], "/no/such/server cannot be started: "),
    ],
)
def test_the_end_of_a_launched_server_is_reported(words: list[str], finding: str) -> None:
    told: list[str] = []
    has_ended = threading.Event()

    def note(how: str) -> None:
        told.append(how)
        has_ended.set()

    LaunchedServer(words).watch(note)
    assert has_ended.wait(DEADLINE_S)
    assert told[0].startswith(finding)
