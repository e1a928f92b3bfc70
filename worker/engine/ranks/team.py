"""The ranks above 0 as seen by rank 0: sends commands, gathers answers, and ends all ranks when one ends."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import structlog

from ....shared.errors import ConfigurationError, EngineDeadError, ModelLoadError, PenstockError
from ...core import exit_report
from .messages import RankAnswer, RankCommand, RankFailed, StopRank, encode
from .process import Rank

# How long to search for the lost rank after a loss is noticed, and how long the core's main thread has to notice it
# before the watching thread ends the process, because the main thread may wait in a collective that never returns.
GRACE_S = 1.0
# The same during loading, because a rank reads files for long before its first collective, and reports errors then.
LOAD_GRACE_S = 30.0
# How long to wait for the exit of a rank whose sockets are closed. On a busy host its sockets, and so the collectives
# of others, may close long before its exit is visible, and only the exit status shows whether it was killed.
END_TIMEOUT_S = 30.0
# How long a core that has noticed the loss has to end normally.
EXIT_TIMEOUT_S = 2.0
# How long ranks have to stop: less than the worker process gives their core.
STOP_TIMEOUT_S = 3.0
_WORDS_TIMEOUT_S = 0.05
# For answers that wait for a slow disk. A rank that ends meanwhile is still noticed.
FILES_TIMEOUT_S = 3600.0
_REFUSALS: dict[str, type[PenstockError]] = {error.code: error for error in (ConfigurationError, ModelLoadError)}
_T = TypeVar("_T")

log = structlog.get_logger(__name__)


class RankLostError(EngineDeadError):
    """A rank has failed or lost its connection to the others, which cannot continue without it."""


class RankKilledError(RankLostError):
    """A rank was killed from outside, so no request is the cause. The worker process recognizes it by its name."""


class RankRefusedError(RankLostError):
    """A rank failed to run a command but still works. The others may have run it."""


class Question:
    """A command that all ranks answer, and their answers once they are there.

    Args:
        timeout_s: a rank that does not answer for this long is taken for hung.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.answers: list[RankAnswer] | None = None


class RankTeam:
    """The processes of the ranks above 0, in the order of ranks.

    Several threads may send commands and wait for answers. Ranks answer in the order of commands, so a thread also
    receives the answers to earlier questions, for the threads that asked them.

    If one of them ends, this process ends too: the core's main thread raises the result of ``loss``, or, if it hangs,
    the watching thread ends the process with the same message.

    Args:
        timeout_s: a rank that does not answer for this long is taken for hung.

    Attributes:
        loading: whether each rank has loaded its part, which it says without a command.
    """

    def __init__(self, processes: Sequence[Rank], timeout_s: float) -> None:
        self.processes = processes
        self._timeout_s = timeout_s
        self._grace_s = LOAD_GRACE_S
        self._is_closing = threading.Event()
        self._verdict: EngineDeadError | None = None
        self._failures: list[tuple[Rank, RankFailed]] = []
        self._is_noticed = threading.Event()
        self._judging = threading.Lock()
        self._sending = threading.Lock()
        self.loading = Question(timeout_s)
        # Those without answers, in the order in which they were sent.
        self._questions = deque([self.loading])
        self._receiving = threading.Lock()
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def send(self, command: RankCommand) -> None:
        """Send ``command``, which has no answer, to all ranks.

        Raises:
            RankLostError: a rank is lost.
        """
        self._send_to_all(command, None)

    def ask_ranks(self, command: RankCommand, timeout_s: float = 0.0) -> Question:
        """Send ``command`` to all ranks, whose answers ``gather`` returns. Raises as ``send``.

        Args:
            timeout_s: how long to wait for answers, if longer than for a collective.
        """
        question = Question(max(timeout_s, self._timeout_s))
        self._send_to_all(command, question)
        return question

    def _send_to_all(self, command: RankCommand, question: Question | None) -> None:
        if self._verdict is not None:
            raise self._verdict
        data = encode(command)
        with self._sending:
            if question is not None:
                self._questions.append(question)
            for process in self.processes:
                try:
                    process.channel.send_bytes(data)
                except OSError as error:
                    raise self.loss(error) from error

    def gather(self, question: Question) -> list[RankAnswer]:
        """Return the answers of all ranks to ``question``.

        Raises:
            RankLostError: a rank is lost.
        """
        with self._receiving:
            while question.answers is None:
                self._questions[0].answers = self._receive_answers(self._questions[0])
                self._questions.popleft()
        return question.answers

    def _receive_answers(self, question: Question) -> list[RankAnswer]:
        answers: list[RankAnswer] = []
        for process in self.processes:
            try:
                answer = process.channel.receive(question.timeout_s)
            except EOFError as error:
                raise self.loss(error) from error
            if answer is None:
                raise self._end_hung_rank(process, question.timeout_s)
            if isinstance(answer, RankFailed) and answer.has_ended and question is not self.loading:
                self._note_failure(process, answer)
                raise self.loss(failure_of(process, answer))
            answers.append(answer)
        return answers

    def together(
        self, command: RankCommand, act: Callable[[], _T], timeout_s: float = 0.0
    ) -> tuple[_T, list[RankAnswer]]:
        """Run a harmless command on all ranks, on this one by ``act``; return its result and the answers.

        Args:
            timeout_s: as for ``ask_ranks``.

        Raises:
            RankLostError: a rank is lost.
            Exception: any error of ``act``.
            RankRefusedError: another rank failed but still works; the message states its error.
        """
        question = self.ask_ranks(command, timeout_s)
        failure: Exception | None = None
        result: _T | None = None
        try:
            result = act()
        except Exception as error:
            failure = error
        answers = self.gather(question)
        if failure is not None:
            raise failure
        for process, answer in zip(self.processes, answers, strict=True):
            if isinstance(answer, RankFailed):
                raise RankRefusedError(words_of(process, answer))
        return result, answers  # type: ignore[return-value]  # None only if ``act`` returns None

    def compute(self, command: RankCommand, act: Callable[[], _T]) -> tuple[_T, list[RankAnswer]]:
        """Run a command with collectives on all ranks, on this one by ``act``; return its result and the answers.

        Raises:
            EngineDeadError: it failed on a rank. The others may wait in any collective then.
        """
        question = self.ask_ranks(command)
        try:
            result = act()
        except Exception as error:
            raise self.loss(error) from error
        return result, self.gather(question)

    def loss(self, error: BaseException) -> EngineDeadError:
        """Kill all ranks and return why they cannot continue; ``error`` comes from a thread of the core.

        Even if the caller swallows the result, no rank computes any more and this process ends.
        """
        self._is_noticed.set()
        verdict = self._judge(f"rank 0: {type(error).__name__}: {_first_line(error)}")
        for process in self.processes:
            process.kill()
        return verdict

    def failed_load(self, error: Exception) -> PenstockError:
        """Return why the model could not be loaded; ``error`` comes from this rank.

        ``error`` may only be a consequence of another rank's refusal or death, with any message.
        """
        self._is_noticed.set()
        with self._judging:
            if self._await_end(GRACE_S):
                for _, failure in sorted(self._failures, key=_moment_of):
                    if failure.code in _REFUSALS:
                        return _REFUSALS[failure.code](failure.message)
                if any((process.poll() or 0) < 0 for process in self.processes):
                    return self._reason()
        return error if isinstance(error, PenstockError) else self.loss(error)

    def set_loaded(self) -> None:
        """Shorten the grace time, because the core's main thread notices a loss soon once the model is loaded."""
        self._grace_s = GRACE_S

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the ranks, and kill those that take longer than ``timeout_s``. A second call does nothing."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        give_up_at = time.monotonic() + timeout_s
        if self._sending.acquire(timeout=timeout_s):  # unless another thread sends to a rank that hangs
            for process in self.processes:
                with suppress(OSError):
                    process.channel.send(StopRank())
            self._sending.release()
        for process in self.processes:
            select.select([process.pidfd], [], [], max(0.0, give_up_at - time.monotonic()))
            process.kill()
        self._watching.join()
        for process in self.processes:
            process.close()

    def _end_hung_rank(self, process: Rank, timeout_s: float) -> EngineDeadError:
        stopped = ": it was stopped by a signal" if process.is_stopped else ""
        words = f"{_name_of(process)} did not answer for {timeout_s:g} s{stopped}"
        self._is_noticed.set()
        self._verdict = RankKilledError(words) if stopped else RankLostError(words)
        for other in self.processes:
            other.kill()
        return self._verdict

    def _watch(self) -> None:
        """End this process once a rank has ended. Runs in the watching thread."""
        select.select([process.pidfd for process in self.processes], [], [])
        if self._is_closing.is_set():
            return
        if self._is_noticed.wait(self._grace_s):
            with self._judging:
                pass  # wait while the core's main thread determines the cause
            if self._is_closing.wait(max(EXIT_TIMEOUT_S, self._grace_s)):
                return
        reason = self._judge("a rank has ended")
        log.error("rank_lost", error=str(reason))
        exit_report.write(f"{type(reason).__module__}.{type(reason).__qualname__}: {reason}\n")
        os._exit(1)

    def _judge(self, words: str) -> EngineDeadError:
        """Determine why the ranks cannot continue; ``words`` is the reason if no rank ends."""
        with self._judging:
            if self._verdict is None:
                self._verdict = self._reason() if self._await_end(GRACE_S) else RankLostError(words)
            return self._verdict

    def _await_end(self, timeout_s: float) -> bool:
        """Return whether a rank fails or ends within ``timeout_s``. Waits for the exit of ranks with closed sockets."""
        give_up_at = time.monotonic() + timeout_s
        while not (self._has_failures() or self._closed()):
            ends = [end for process in self.processes for end in (process.pidfd, process.channel)]
            if not select.select(ends, [], [], max(0.0, give_up_at - time.monotonic()))[0]:
                return False
        give_up_at = time.monotonic() + END_TIMEOUT_S
        while ending := [process.pidfd for process in self._closed() if process.poll() is None]:
            if not select.select(ending, [], [], max(0.0, give_up_at - time.monotonic()))[0]:
                break
        return self._has_failures() or any(process.poll() is not None for process in self.processes)

    def _closed(self) -> list[Rank]:
        """Return the ranks that have ended or are ending: their sockets are closed."""
        return [process for process in self.processes if process.poll() is not None or process.channel.is_closed]

    def _has_failures(self) -> bool:
        self._read_failures()
        return bool(self._failures)

    def _reason(self) -> EngineDeadError:
        """Return the cause of the loss: a signal, since failures follow from it, or else the first failure."""
        self._read_failures()
        ended = [(process, *process.describe_end()) for process in self.processes if process.poll() is not None]
        killed = [end for end in ended if (end[0].poll() or 0) < 0]
        for process, words, is_external in sorted(killed, key=lambda end: not end[2]):
            kind = RankKilledError if is_external else RankLostError
            return kind(f"{_name_of(process)} {words}")
        if self._failures:
            return failure_of(*min(self._failures, key=_moment_of))
        process, words, _ = ended[0]
        return RankLostError(f"{_name_of(process)} {words}")

    def _read_failures(self) -> None:
        """Read the failures that ranks have reported."""
        reported = {process.rank for process, _ in self._failures}
        for process in self.processes:
            with suppress(EOFError, OSError):
                while (answer := process.channel.receive(_WORDS_TIMEOUT_S)) is not None:
                    if isinstance(answer, RankFailed) and process.rank not in reported:
                        self._note_failure(process, answer)

    def _note_failure(self, process: Rank, failure: RankFailed) -> None:
        self._failures.append((process, failure))
        if failure.trace:
            log.error("rank_failed", rank=process.rank, error=failure.message, trace=failure.trace)


def failure_of(process: Rank, failure: RankFailed) -> RankLostError:
    """Return the error for the failure that a rank has reported."""
    return RankLostError(words_of(process, failure))


def _moment_of(reported: tuple[Rank, RankFailed]) -> int:
    """Return the time of a failure by the clock of this host."""
    process, failure = reported
    return failure.at_ns + process.clock_offset_ns


def _name_of(process: Rank) -> str:
    on_host = f" of host {process.host}" if process.host else ""
    return f"rank {process.rank} (process {process.pid}{on_host})"


def words_of(process: Rank, failure: RankFailed) -> str:
    """Return the failure that a rank has reported as a sentence."""
    return f"rank {process.rank} failed: {failure.message}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
