"""The event loop behind the blocking client."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from penstock.producer.blocking.loop_thread import LoopThread
from penstock.shared.errors import ClientClosedError


def test_interrupt_ends_the_work_before_it_is_raised() -> None:
    thread = LoopThread()
    events = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            events.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    events.append("raised")
    thread.stop()
    assert events == ["cleaned up", "raised"]


def test_interrupt_that_does_not_wake_the_caller_is_noticed() -> None:
    """The signal is like one that arrives just before the caller begins to wait."""
    thread = LoopThread()

    async def work() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    thread.stop()


def test_errors_and_results_reach_the_caller() -> None:
    thread = LoopThread()

    async def fail() -> None:
        raise ValueError("no")

    async def give() -> int:
        return 5

    async def give_up() -> None:
        raise TimeoutError("too late")

    with pytest.raises(ValueError, match="no"):
        thread.run(fail())
    with pytest.raises(TimeoutError, match="too late"):
        thread.run(give_up())
    assert thread.run(give()) == 5
    thread.stop()


def test_work_that_is_cancelled_from_another_thread_ends_with_an_error_of_the_client() -> None:
    thread = LoopThread()
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    def close() -> None:
        begun.wait()
        thread.cancel_work()
        thread.stop()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(ClientClosedError, match="closed while this call ran"):
        thread.run(work())
    closing.join()
    with pytest.raises(ClientClosedError):
        thread.run(work())
