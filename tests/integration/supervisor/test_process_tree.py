"""Killing a process with everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from penstock.worker.processes.process_tree import Lifeline, kill_process_tree

from ...processes import DEADLINE_S, is_gone
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
    assert head.wait(timeout=DEADLINE_S) == -9
    wait_until(lambda: all(is_gone(member) for member in members), "somebody was left")


def test_orphans_of_a_dead_head_die(family: tuple[subprocess.Popen[str], list[psutil.Process]]) -> None:
    head, (child, _, orphan) = family
    head.kill()
    head.wait(timeout=DEADLINE_S)
    kill_process_tree(head.pid)
    wait_until(lambda: is_gone(child) and is_gone(orphan), "somebody was left")


def test_killing_an_ended_process_tree_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait(timeout=DEADLINE_S)
    kill_process_tree(process.pid)


# Reports that it lives, and then never returns to its interpreter or handles a signal.
TIED = """
import signal, sys
from penstock.worker.processes.process_tree import die_with_lifeline
die_with_lifeline(int(sys.argv[1]))
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
print("lives", flush=True)
pow(3, 1 << 40)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_process_ends_with_its_lifeline_whatever_it_does(is_stopped: bool) -> None:
    lifeline = Lifeline()
    command = [sys.executable, "-c", TIED, str(lifeline.reader)]
    process = subprocess.Popen(command, pass_fds=[lifeline.reader], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"lives\n"
    if is_stopped:
        process.send_signal(signal.SIGSTOP)
    lifeline.close()
    assert process.wait(timeout=DEADLINE_S) == -signal.SIGKILL
    process.stdout.close()


def test_a_process_without_a_lifeline_does_not_begin() -> None:
    lifeline = Lifeline()
    reader = os.dup(lifeline.reader)
    lifeline.close()
    result = subprocess.run([sys.executable, "-c", TIED, str(reader)], pass_fds=[reader], stdout=subprocess.PIPE)
    os.close(reader)
    assert (result.returncode, result.stdout) == (0, b"")
