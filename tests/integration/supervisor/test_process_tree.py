"""Killing a process with everything it started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from penstock.worker.processes.process_tree import kill_process_tree

from ...processes import is_gone
from .conftest import wait_until

# A child in the group, a grandchild in a session of its own, and a child whose parent has died.
FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(sleep)
leave = f"import subprocess; print(subprocess.Popen({sleep!r}, stdout=subprocess.DEVNULL).pid)"
orphan = int(subprocess.check_output([sys.executable, "-c", leave]))
stranger = subprocess.Popen(sleep, start_new_session=True)
print(child.pid, stranger.pid, orphan, flush=True)
time.sleep(60)
"""


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    head = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert head.stdout is not None
    members = [psutil.Process(int(pid)) for pid in head.stdout.readline().split()]
    yield head, members
    for process in (member for member in members if member.is_running()):
        process.kill()
    head.kill()
    head.communicate()


def test_descendants_and_group_die(family: tuple[subprocess.Popen[str], list[psutil.Process]]) -> None:
    head, members = family
    assert not any(is_gone(member) for member in members)
    kill_process_tree(head.pid)
    assert head.wait(timeout=240) == -9
    wait_until(lambda: all(is_gone(member) for member in members), "somebody was left")


def test_orphans_of_a_dead_head_die(family: tuple[subprocess.Popen[str], list[psutil.Process]]) -> None:
    head, (child, _, orphan) = family
    head.kill()
    head.wait(timeout=240)
    kill_process_tree(head.pid)
    wait_until(lambda: is_gone(child) and is_gone(orphan), "somebody was left")


def test_killing_an_ended_process_tree_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait(timeout=240)
    kill_process_tree(process.pid)
