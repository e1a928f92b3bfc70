"""Threads that compile grammars, read adapters, or process images, beside the step loop.

A thread cannot be stopped from outside. One whose task takes too long is given up: nobody waits for it any more, and
another takes its place until its task ends. There are never more than ``max_threads``; when all are given up, tasks
wait until one comes back. The libraries release the GIL while they compile, so the step loop goes on; and since the
threads are daemons, a process that is told to leave does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

# A thread that waits for something takes no time of a processor, and one of a busy machine waits for that.
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
        """Count the time from now on; called again after what is not the task's own work."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._clock_started_s = time.clock_gettime(self._clock)
        self.started_s = time.monotonic()

    @property
    def taken_s(self) -> float:
        """What it has taken so far: of a processor, but a sixth of the time that has passed at least."""
        if self.started_s is None:
            return 0.0
        passed_s = time.monotonic() - self.started_s
        if self._clock is None:
            return passed_s
        try:
            computed_s = time.clock_gettime(self._clock) - self._clock_started_s
        except OSError:  # its thread has ended, and so has it
            return 0.0
        return max(computed_s, WAITING_SHARE * passed_s)


class CompileThreads:
    """Runs tasks in their order, ``num_threads`` at a time, plus those that were given up.

    Args:
        name: of the threads, before their numbers.
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
        """Run ``work`` as soon as a thread is free; it gets its own task."""
        task = Task(work)
        self._tasks.put(task)
        with self._lock:
            self._start_thread()
        return task

    def give_up(self, task: Task) -> None:
        """Wait for ``task`` no longer."""
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
            except BaseException as error:  # the panic of a library in Rust is no Exception
                task.error = error
            with self._lock:
                task.is_done = True
                self._num_given_up -= task.is_given_up
                is_surplus = self._num_alive - self._num_given_up > self._num_threads
                self._num_alive -= is_surplus
            self._progress.set()
            if is_surplus:
                return
