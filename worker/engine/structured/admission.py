"""Requests that wait for their grammars.

A request with a grammar is added here before it enters the scheduler. Its grammar is in the cache, or a thread compiles
it once for all requests that wait for it. Then a thread replays the tokens that a former engine has delivered. The step
loop only polls for the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ....shared.errors import PenstockError, UnsupportedParameterError, ValidationError
from ....shared.messages.outcome import RequestError
from ....shared.process.boundary import describe
from ..scheduling.request import Request, RequestStatus
from .cache import GrammarCache
from .constraint import FAILED, GrammarConstraint, new_bitmask
from .grammar import Backend, CompiledGrammar, Grammar
from .loader import LazyBackend
from .spec import GrammarSpec, spec_of
from .thinking import LaterConstraint, Thinking, thinking_of
from .threads import CompileThreads, Task

COMPILE_TIMEOUT_S = 10.0
# How long a request waits for a thread while all compile slow grammars.
QUEUE_TIMEOUT_S = 30.0
NUM_THREADS = 2
MAX_THREADS = 4
CACHE_BYTES = 256 << 20
CACHE_ENTRIES = 512
BUSY = "grammar_compiler_busy"


@dataclass
class _Waiting:
    request: Request
    spec: GrammarSpec
    ending_token_ids: frozenset[int]
    thinking: Thinking | None
    task: Task | None = None
    grammar: Grammar | None = None


class GrammarAdmission:
    """Gives each request with ``structured_outputs`` its ``Constraint``.

    Args:
        load_backend: called in a thread when the first request needs it.
        eos_token_ids: the model's end-of-sequence tokens.
        compile_timeout_s: a grammar that takes longer to compile is refused; processor time (``threads.py``).
        queue_timeout_s: how long a request may wait for a thread.
    """

    def __init__(
        self,
        load_backend: Callable[[], Backend],
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        compile_timeout_s: float = COMPILE_TIMEOUT_S,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
    ) -> None:
        self._backend = LazyBackend(load_backend)
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._compile_timeout_s = compile_timeout_s
        self._queue_timeout_s = queue_timeout_s
        self._threads = CompileThreads(NUM_THREADS, MAX_THREADS)
        self.cache = GrammarCache(CACHE_BYTES, CACHE_ENTRIES)
        self._compiling: dict[GrammarSpec, Task] = {}
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def add(self, request: Request) -> None:
        """Queue ``request`` for its grammar; ``pop_ready`` returns it.

        Raises:
            ValidationError: the request can be refused without compiling.
        """
        params = request.params.structured_outputs
        assert params is not None
        spec = spec_of(params)
        # ``ignore_eos`` is ignored, because no token may follow the end of a grammar.
        ending_token_ids = self._eos_token_ids | request.stop_token_ids
        if not ending_token_ids:
            raise UnsupportedParameterError(
                "structured_outputs needs a token that ends the output: the model has no end-of-sequence token, and "
                "the request no stop_token_ids"
            )
        request.move_to(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
        task = None if self.cache.get(spec) is not None else self._compile(spec)
        thinking = thinking_of(request)
        self._waiting[request.request_id] = _Waiting(request, spec, ending_token_ids, thinking, task)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop these requests. Grammars that compile for them are still cached."""
        for request_id in request_ids:
            waiting = self._waiting.pop(request_id, None)
            if waiting is not None:
                waiting.request.move_to(RequestStatus.FINISHED_ABORTED)

    def wait(self, timeout_s: float) -> None:
        """Wait until a thread has finished a task, at most ``timeout_s``."""
        if not any(waiting.task is None for waiting in self._waiting.values()):
            self._threads.wait(timeout_s)

    def pop_ready(self) -> list[tuple[Request, RequestError | None]]:
        """Return the requests that are ready, in order: each has its constraint, or comes with an error."""
        ready: list[tuple[Request, RequestError | None]] = []
        for request_id, waiting in list(self._waiting.items()):
            try:
                is_ready = self._advance(waiting)
                error = None
            except PenstockError as refused:
                is_ready, error = True, RequestError(refused.code, str(refused), refused.retryable)
            except _BusyError as busy:
                is_ready, error = True, RequestError(BUSY, str(busy), retryable=True)
            except BaseException as failed:  # a panic in a Rust library is not an Exception
                is_ready = True
                error = RequestError(FAILED, f"structured_outputs: the library failed: {describe(failed)}")
            if is_ready:
                del self._waiting[request_id]
                status = RequestStatus.WAITING if error is None else RequestStatus.FINISHED_ERROR
                waiting.request.move_to(status)
                ready.append((waiting.request, error))
        return ready

    def _advance(self, waiting: _Waiting) -> bool:
        """Return whether the request has its constraint; raise the error that prevents it."""
        if waiting.task is not None and not self._is_done(waiting):
            return False
        try:
            result = None if waiting.task is None else _result_of(waiting.task)
        except ReplayError:
            if not waiting.spec.limits_lengths:
                raise
            # An engine of an older version may have begun the output, because lengths had no limit there.
            self._start_over(waiting, replace(waiting.spec, has_any_length=True))
            return False
        waiting.task = None
        if waiting.grammar is None:
            return self._begin(waiting, result or self.cache.get(waiting.spec))
        self._constrain(waiting, waiting.grammar)
        return True

    def _begin(self, waiting: _Waiting, compiled: CompiledGrammar | None) -> bool:
        if compiled is None:  # it was evicted from the cache meanwhile
            waiting.task = self._compile(waiting.spec)
            return False
        waiting.grammar = compiled.start(waiting.ending_token_ids)
        delivered = waiting.request.token_ids[waiting.request.num_prompt_tokens :]
        if (thinking := waiting.thinking) is not None:
            delivered = [token_id for token_id in delivered if not thinking.takes(token_id)]
        if delivered:
            waiting.task = self._threads.submit(_replay(waiting.grammar, delivered))
            return False
        self._constrain(waiting, waiting.grammar)
        return True

    def _start_over(self, waiting: _Waiting, spec: GrammarSpec) -> None:
        waiting.spec, waiting.grammar, waiting.thinking = spec, None, thinking_of(waiting.request)
        waiting.task = None if self.cache.get(spec) is not None else self._compile(spec)

    def _constrain(self, waiting: _Waiting, grammar: Grammar) -> None:
        request, ending = waiting.request, waiting.ending_token_ids
        if waiting.thinking is None:
            request.constraint = GrammarConstraint(request.request_id, grammar, self._vocab_size, ending)
        else:
            request.constraint = LaterConstraint(
                request.request_id, grammar, self._vocab_size, ending, waiting.thinking
            )

    def _compile(self, spec: GrammarSpec) -> Task:
        task = self._compiling.get(spec)
        # Join a task that was given up and still runs, so that a repeated request is refused immediately.
        if task is None or task.is_done:
            self._compiling = {spec: task for spec, task in self._compiling.items() if not task.is_done}
            task = self._compiling[spec] = self._threads.submit(self._compile_and_cache(spec))
        return task

    def _compile_and_cache(self, spec: GrammarSpec) -> Callable[[Task], CompiledGrammar]:
        def work(task: Task) -> CompiledGrammar:
            backend = self._backend.get()
            task.start_clock()
            compiled = backend.compile(spec)
            # A first mask shows whether any output is possible, and warms up structures that are created lazily.
            bitmask = new_bitmask(1, self._vocab_size)
            some_token = frozenset(sorted(self._eos_token_ids)[:1] or [0])
            probe = GrammarConstraint("", compiled.start(some_token), self._vocab_size, some_token)
            probe.fill(bitmask, 0)
            if probe.failure is not None:
                raise ValidationError(probe.failure.message.replace("structured_outputs", spec.field, 1))
            self.cache.put(spec, compiled)
            return compiled

        return work

    def _is_done(self, waiting: _Waiting) -> bool:
        task = waiting.task
        if task is None or task.is_done:
            return True
        if task.started_s is None:
            if time.monotonic() - task.created_s > self._queue_timeout_s:
                self._threads.give_up(task)
                raise _BusyError("structured_outputs: all threads compile grammars that take too long; try again later")
        elif task.taken_s > self._compile_timeout_s:
            self._threads.give_up(task)
            raise ValidationError(
                f"{waiting.spec.field} takes more than {self._compile_timeout_s:g} s to compile; make it simpler "
                f"(fewer optional properties, smaller bounds of repetition)"
            )
        return False


class _BusyError(Exception):
    """All threads are busy with grammars that take too long."""


class ReplayError(RuntimeError):
    """The output so far does not follow the grammar."""


def _replay(grammar: Grammar, token_ids: list[int]) -> Callable[[Task], Any]:
    def work(task: Task) -> None:
        if not grammar.accept_tokens(token_ids):
            raise ReplayError("the output so far, which a former engine has delivered, does not follow the grammar")

    return work


def _result_of(task: Task) -> Any:
    if task.error is not None:
        raise task.error
    return task.result
