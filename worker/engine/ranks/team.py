"""The ranks above 0, as rank 0 has them: what they are told, what they answer, and that all end when one does."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import structlog

from ....shared.errors import ConfigurationError, EngineDeadError, ModelLoadError, PenstockError
from ...core import exit_report
from ...process_tree import is_stopped
from .channel import encode
from .errors import RankKilledError, RankLostError, RankRefusedError
from .messages import RankAnswer, RankCommand, RankFailed, StopRank
from .process import RankProcess

# How long whoever notices a loss looks for the rank that is gone, and how long the core's own thread has to notice it,
# before the process is ended under it: it may wait in a collective that never returns.
GRACE_S = 1.0
# The same while it loads: it reads for long before it meets the others, and then it can say what is wrong.
LOAD_GRACE_S = 30.0
# How long a rank has to end that is about to. Its sockets, and so the collectives of others, may be closed long before
# its end can be seen, on a host that gives it no time; and only its end says whether somebody has killed it.
END_TIMEOUT_S = 30.0
# How long a core that knows of the loss has to end in order.
EXIT_TIMEOUT_S = 2.0
# How long ranks that were told to end have to: less than the worker process gives their core.
STOP_TIMEOUT_S = 3.0
_WORDS_TIMEOUT_S = 0.05
# Of answers that wait for a disk, which ranks may find slow: a rank that ends meanwhile is noticed all the same.
FILES_TIMEOUT_S = 3600.0
_REFUSALS: dict[str, type[PenstockError]] = {error.code: error for error in (ConfigurationError, ModelLoadError)}
_T = TypeVar("_T")

log = structlog.get_logger(__name__)


class RankTeam:
    """Processes of ranks, in their order.

    One that ends is the end of this process, whatever it does at the moment: the core's own thread raises what
    ``loss`` returns, or, if it does not get to it, the process is ended with the same words.

    Args:
        timeout_s: a rank that does not answer for so long hangs.
    """

    def __init__(self, processes: Sequence[RankProcess], timeout_s: float) -> None:
        self.processes = processes
        self._timeout_s = timeout_s
        self._grace_s = LOAD_GRACE_S
        self._is_closing = threading.Event()
        self._verdict: EngineDeadError | None = None
        self._failures: list[tuple[RankProcess, RankFailed]] = []
        self._is_noticed = threading.Event()
        self._judging = threading.Lock()
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def send(self, command: RankCommand) -> None:
        """Tell all ranks the same.

        Raises:
            RankLostError: one is gone.
        """
        if self._verdict is not None:
            raise self._verdict
        data = encode(command)
        for process in self.processes:
            try:
                process.channel.send_bytes(data)
            except OSError as error:
                raise self.loss(error) from error

    def gather(self, timeout_s: float = 0.0) -> list[RankAnswer]:
        """Return what each answers to the last command that has an answer.

        Args:
            timeout_s: how long it may take, where that is more than a collective may.

        Raises:
            RankLostError: one is gone.
        """
        timeout_s = max(timeout_s, self._timeout_s)
        answers: list[RankAnswer] = []
        for process in self.processes:
            try:
                answer = process.channel.receive(timeout_s)
            except EOFError as error:
                raise self.loss(error) from error
            if answer is None:
                raise self._end_silence(process, timeout_s)
            answers.append(answer)
        return answers

    def together(
        self, command: RankCommand, act: Callable[[], _T], timeout_s: float = 0.0
    ) -> tuple[_T, list[RankAnswer]]:
        """Have all ranks do what can fail without harm, this one by ``act``; returns what that gave, and the answers.

        Args:
            timeout_s: as ``gather`` takes it.

        Raises:
            RankLostError: a rank is gone.
            Exception: what ``act`` raises.
            RankRefusedError: another rank failed and stays; the message says how.
        """
        self.send(command)
        failure: Exception | None = None
        result: _T | None = None
        try:
            result = act()
        except Exception as error:
            failure = error
        answers = self.gather(timeout_s)
        if failure is not None:
            raise failure
        for process, answer in zip(self.processes, answers, strict=True):
            if isinstance(answer, RankFailed):
                raise RankRefusedError(_words_of(process, answer))
        return result, answers  # type: ignore[return-value]  # None only where that is what ``act`` gives

    def compute(self, command: RankCommand, act: Callable[[], _T]) -> tuple[_T, list[RankAnswer]]:
        """As ``together``, of what has collectives in it: where it fails, nobody knows what the others wait for.

        Raises:
            EngineDeadError: it failed, here or elsewhere.
        """
        self.send(command)
        try:
            result = act()
        except Exception as error:
            raise self.loss(error) from error
        return result, self.gather()

    def loss(self, error: BaseException) -> EngineDeadError:
        """Return why the ranks cannot go on, from what the core's own thread was told: ``error``.

        Whoever may swallow what is raised then: no rank computes any more, and this process ends.
        """
        self._is_noticed.set()
        verdict = self._judge(f"rank 0: {type(error).__name__}: {_first_line(error)}")
        for process in self.processes:
            process.kill()
        return verdict

    def failed_load(self, error: Exception) -> PenstockError:
        """Return why the model could not be loaded, from what this rank was told: ``error``.

        It may be what follows from another rank's refusal, or from its death, in whatever words.
        """
        self._is_noticed.set()
        with self._judging:
            if self._await_end(GRACE_S):
                for _, failure in sorted(self._failures, key=lambda pair: pair[1].at_ns):
                    if failure.code in _REFUSALS:
                        return _REFUSALS[failure.code](failure.message)
                if any((process.poll() or 0) < 0 for process in self.processes):
                    return self._reason()
        return error if isinstance(error, PenstockError) else self.loss(error)

    def note_loaded(self) -> None:
        """From now on the core's own thread soon notices what happens."""
        self._grace_s = GRACE_S

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the ranks: asked first, killed after a while. Twice does nothing."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        for process in self.processes:
            with suppress(OSError):
                process.channel.send(StopRank())
        give_up_at = time.monotonic() + timeout_s
        for process in self.processes:
            select.select([process.pidfd], [], [], max(0.0, give_up_at - time.monotonic()))
            process.kill()
        self._watching.join()
        for process in self.processes:
            process.close()

    def _end_silence(self, process: RankProcess, timeout_s: float) -> EngineDeadError:
        stopped = ": it was stopped by a signal" if is_stopped(process.pid) else ""
        words = f"rank {process.rank} (process {process.pid}) did not answer for {timeout_s:g} s{stopped}"
        self._is_noticed.set()
        self._verdict = RankKilledError(words) if stopped else RankLostError(words)
        for one in self.processes:
            one.kill()
        return self._verdict

    def _watch(self) -> None:
        """In a thread of its own: end this process once a rank has ended."""
        select.select([process.pidfd for process in self.processes], [], [])
        if self._is_closing.is_set():
            return
        if self._is_noticed.wait(self._grace_s):
            with self._judging:
                pass  # the core's own thread finds out who it was
            if self._is_closing.wait(max(EXIT_TIMEOUT_S, self._grace_s)):
                return
        reason = self._judge("a rank has ended")
        log.error("rank_lost", error=str(reason))
        exit_report.write(f"{type(reason).__module__}.{type(reason).__qualname__}: {reason}\n")
        os._exit(1)

    def _judge(self, words: str) -> EngineDeadError:
        """Find out why the ranks cannot go on; ``words`` say it if no rank ends."""
        with self._judging:
            if self._verdict is None:
                self._verdict = self._reason() if self._await_end(GRACE_S) else RankLostError(words)
            return self._verdict

    def _await_end(self, timeout_s: float) -> bool:
        """Whether a rank has failed or ended, or does so within that time. Those whose sockets are closed by then have
        ended, too."""
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

    def _closed(self) -> list[RankProcess]:
        """Ranks that have ended, or are about to: their sockets are closed."""
        return [process for process in self.processes if process.poll() is not None or process.channel.is_closed]

    def _has_failures(self) -> bool:
        self._take_failures()
        return bool(self._failures)

    def _reason(self) -> EngineDeadError:
        """Of the loss: first a signal, for what others fail of then follows from it, else who failed first."""
        self._take_failures()
        ended = [(process, *process.describe_end()) for process in self.processes if process.poll() is not None]
        killed = [one for one in ended if (one[0].poll() or 0) < 0]
        for process, words, is_external in sorted(killed, key=lambda one: not one[2]):
            kind = RankKilledError if is_external else RankLostError
            return kind(f"rank {process.rank} (process {process.pid}) {words}")
        if self._failures:
            process, failure = min(self._failures, key=lambda pair: pair[1].at_ns)
            return failure_of(process, failure)
        process, words, _ = ended[0]
        return RankLostError(f"rank {process.rank} (process {process.pid}) {words}")

    def _take_failures(self) -> None:
        """Read what ranks said at their end."""
        known = {process.rank for process, _ in self._failures}
        for process in self.processes:
            with suppress(EOFError, OSError):
                while (answer := process.channel.receive(_WORDS_TIMEOUT_S)) is not None:
                    if isinstance(answer, RankFailed) and process.rank not in known:
                        self._failures.append((process, answer))
                        if answer.trace:
                            log.error("rank_failed", rank=process.rank, error=answer.message, trace=answer.trace)


def failure_of(process: RankProcess, failure: RankFailed) -> RankLostError:
    """What a rank could not do."""
    return RankLostError(_words_of(process, failure))


def _words_of(process: RankProcess, failure: RankFailed) -> str:
    return f"rank {process.rank} failed: {failure.message}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
