"""An event loop in a separate thread, for callers that block."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import warnings
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ...shared.errors import ClientClosedError

T = TypeVar("T")

SIGNAL_POLL_S = 0.5


def warn_in_event_loop() -> None:
    """Warn a caller whose thread runs an event loop, which stands still until the blocking call returns.

    In a notebook it does so during every cell, so there is no warning there.
    """
    if asyncio._get_running_loop() is None or "ipykernel" in sys.modules:
        return
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("penstock."):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "LLM blocks the event loop of this thread, and nothing else runs in it meanwhile; use "
        "`async with Client.connect(url) as client` in coroutines, or call LLM in a thread: asyncio.to_thread(…)",
        RuntimeWarning,
        stacklevel=level,
    )


class LoopThread:
    """Runs coroutines for any number of threads. It does not survive a fork: a child needs its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # Work of other threads. Once ``_is_stopping`` is set, none is added.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-llm", daemon=True)
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in this thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end. Ctrl-C cancels it.

        Raises:
            ClientClosedError: this process was forked after the loop was started, or the work was cancelled by
                ``cancel_work``.
        """
        if os.getpid() != self._pid:
            work.close()
            raise ClientClosedError(
                f"this was started by process {self._pid}, which forked this one; only that process can continue it, "
                "so start it again here"
            )
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def start_work() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(_copy_outcome, outcome))
            tasks.append(task)

        def abandon() -> None:
            if tasks:
                tasks[0].cancel()
            else:
                work.close()
                _cancel(outcome)

        try:
            with self._lock:
                if self._is_stopping:
                    work.close()
                    raise _closed()
                self._loop.call_soon_threadsafe(start_work)
            return _result_of(outcome)
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(abandon)
            # The caller may close what ``work`` uses, so it must have ended before.
            wait([outcome])
            raise

    def clean_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, which cleans up, and wait for it unless this is the loop's thread. In a forked child, and after
        ``stop``, do nothing.
        """
        if os.getpid() != self._pid:
            work.close()
        elif self.is_current_thread:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        else:
            with suppress(ClientClosedError):
                self.run(work)

    def cancel_work(self) -> None:
        """Cancel what other threads run; they get ``ClientClosedError``."""

        async def cancel_others() -> None:
            for task in self._tasks - {asyncio.current_task()}:
                task.cancel()

        self.run(cancel_others())

    def stop(self) -> None:
        """Cancel all work, wait for its end, and end the loop and the thread."""

        async def end_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        with self._lock:
            self._is_stopping = True
        asyncio.run_coroutine_threadsafe(end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _result_of(outcome: Future[T]) -> T:
    """Wait for ``outcome``, and return or raise it.

    A signal interrupts a wait only if it arrives in this thread after the wait began. So look for one now and then.
    """
    while True:
        try:
            return outcome.result(SIGNAL_POLL_S)
        except TimeoutError:
            if outcome.done():
                return outcome.result()
        except CancelledError:
            raise _closed() from None


def _closed() -> ClientClosedError:
    return ClientClosedError("the LLM was closed while this call ran; create another")


def _copy_outcome(outcome: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        _cancel(outcome)
    elif error := task.exception():
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def _cancel(outcome: Future[T]) -> None:
    outcome.cancel()
    # Only this wakes ``wait``.
    outcome.set_running_or_notify_cancel()
