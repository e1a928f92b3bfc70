"""Children whose exit status reaches who waits for it, whatever signals they get meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from penstock.shared.process.children import start_child


@pytest.fixture(autouse=True)
def _ends_are_seen_by_the_loop() -> Iterator[None]:
    """The loop sees ends as from Python 3.12 on: no reader reaps a child before the loop has its turn."""
    if sys.version_info >= (3, 12):
        yield
        return
    policy = asyncio.get_event_loop_policy()
    before = policy.get_child_watcher()
    policy.set_child_watcher(asyncio.PidfdChildWatcher())
    yield
    policy.set_child_watcher(before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_signal_to_one_that_has_just_ended_leaves_its_status(number: int) -> None:
    ends, ended = os.pipe()
    child = await start_child(["sh", "-c", "read nothing; exit 7"], stdin=ends)
    os.close(ends)
    os.close(ended)
    # Blocking: the loop is not to see it before the signal is sent.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
    child.send_signal(number)
    assert await child.wait() == child.returncode == 7
    with pytest.raises(ProcessLookupError):
        child.send_signal(number)


async def test_a_killed_child_is_reported() -> None:
    child = await start_child(["sleep", "600"])
    child.send_signal(signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
