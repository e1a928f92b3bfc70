"""Background threads that compile grammars, read adapters or process images.

A thread cannot be stopped from outside. If its task takes too long, the task is given up: no request waits for it any
more, and another thread replaces it until the task ends. At most ``max_threads`` exist; if all tasks are given up, new
tasks wait until a thread is free. The libraries release the GIL while they compile, so the step loop keeps running. The
threads are daemons, so they do not delay the exit of the process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

# A waiting thread uses no processor time, and on a busy machine a thread also waits for the processor.
WAITING_SHARE = 1 / 6


class Task:
    """Work for a thread. ``result`` or ``error`` are valid once ``is_done``."""

    def __init__(self, work: Callable[[Task], Any]) -> None:
        self.work = work
        self.created_s = time.monotonic()
        self.started_s: float | None = None
        self._clock: int | None = None
        self._clock_started_s = 0.0
        self.is_done = False
        self.is_given_up = False
        self.result: Any = None
        self.error: BaseException | None = None

    def start_clock(self) -> None:
        """Count the time from now on. Called again to exclude work that does not belong to the task."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._clock_started_s = time.clock_gettime(self._clock)
        self.started_s = time.monotonic()

    @property
    def taken_s(self) -> float:
        """Processor time of the task so far, but at least a sixth of the elapsed time."""
        if self.started_s is None:
            return 0.0
        passed_s = time.monotonic() - self.started_s
        if self._clock is None:
            return passed_s
        try:
            computed_s = time.clock_gettime(self._clock) - self._clock_started_s
        except OSError:  # its thread has ended, so the task has, too
            return 0.0
        return max(computed_s, WAITING_SHARE * passed_s)


class CompileThreads:
    """Runs tasks in order, ``num_threads`` at a time, not counting tasks that were given up.

    Args:
        name: prefix of the threads' names.
    """

    def __init__(self, num_threads: int, max_threads: int, name: str = "grammar") -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_threads = max_threads
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_alive = 0
        self._num_given_up = 0
        self._progress = threading.Event()

    def submit(self, work: Callable[[Task], Any]) -> Task:
        """Run ``work``, which gets its task as the argument, as soon as a thread is free."""
        task = Task(work)
        self._tasks.put(task)
        with self._lock:
            self._start_thread()
        return task

    def give_up(self, task: Task) -> None:
        """Give up ``task`` and let another thread replace its thread."""
        with self._lock:
            if task.is_done or task.is_given_up:
                return
            task.is_given_up = True
            if task.started_s is not None:
                self._num_given_up += 1
                self._start_thread()

    def wait(self, timeout_s: float) -> None:
        """Wait until a task has ended since the last call, at most ``timeout_s``."""
        self._progress.wait(timeout_s)
        self._progress.clear()

    def _start_thread(self) -> None:
        if self._num_alive - self._num_given_up < self._num_threads and self._num_alive < self._max_threads:
            self._num_alive += 1
            threading.Thread(target=self._run, name=f"{self._name}-{self._num_alive}", daemon=True).start()

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            with self._lock:
                if task.is_given_up:
                    continue
                task.start_clock()
            try:
                task.result = task.work(task)
            except BaseException as error:  # a panic in a Rust library is not an Exception
                task.error = error
            with self._lock:
                task.is_done = True
                self._num_given_up -= task.is_given_up
                is_surplus = self._num_alive - self._num_given_up > self._num_threads
                self._num_alive -= is_surplus
            self._progress.set()
            if is_surplus:
                return
