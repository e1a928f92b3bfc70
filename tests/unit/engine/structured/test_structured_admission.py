"""Requests wait for their grammars and hold up no others."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from penstock.shared.errors import ValidationError
from penstock.shared.messages.outcome import FinishReason, RequestError
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.request import Request, RequestStatus
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput
from penstock.worker.engine.structured import admission as admission_module
from penstock.worker.engine.structured.admission import BUSY, GrammarAdmission
from penstock.worker.engine.structured.cache import GrammarCache
from penstock.worker.engine.structured.constraint import FAILED, GrammarConstraint
from penstock.worker.engine.structured.grammar import Bitmask
from penstock.worker.engine.structured.spec import GrammarKind, GrammarSpec
from penstock.worker.engine.structured.threads import WAITING_SHARE, CompileThreads, Task

from ....every_exception import EVERY_EXCEPTION, name_of, raising
from ....processes import DEADLINE_S

EOS, VOCAB_SIZE = 2, 64


class FakeGrammar:
    """Anything but token 13, until the end."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        self.token_ids += token_ids
        return 13 not in token_ids

    def forced_tokens(self, room: int) -> list[int]:
        raise NotImplementedError

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> None:
        bitmask[row] = -1

    def is_terminated(self) -> bool:
        return EOS in self.token_ids

    def reset(self) -> None:
        raise NotImplementedError


class FakeCompiled:
    num_bytes = 1000

    def start(self, ending_token_ids: frozenset[int]) -> FakeGrammar:
        return FakeGrammar()


class FakeBackend:
    """Backend in which ``slow…`` waits for its release, ``bad…`` is refused, ``panic…`` raises a BaseException."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.release_slot = threading.Event()

    def compile(self, spec: GrammarSpec) -> FakeCompiled:
        self.compiled.append(spec.text)
        if spec.text.startswith("slow"):
            assert self.release_slot.wait(DEADLINE_S)
        if spec.text.startswith("bad"):
            raise ValidationError("structured_outputs.regex is bad")
        if spec.text.startswith("panic"):
            raise BaseException("panicked")
        return FakeCompiled()


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    fake = FakeBackend()
    yield fake
    fake.release_slot.set()


def admission_of(backend: FakeBackend, **options: Any) -> GrammarAdmission:
    return GrammarAdmission(lambda: backend, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], **options)


def asking(request_id: str, regex: str, output: Sequence[int] = ()) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex), max_tokens=50)
    return Request(request_id, [1], params, max_model_len=99, output_token_ids=list(output))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ends(admission: GrammarAdmission, num: int) -> dict[str, RequestError | None]:
    """Wait until ``num`` requests wait no longer."""
    ready: dict[str, RequestError | None] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(ready) < num:
        assert time.monotonic() < deadline
        admission.wait(0.01)
        ready |= {request.request_id: error for request, error in admission.pop_ready()}
    return ready


def test_a_repeated_grammar_is_compiled_once(backend: FakeBackend) -> None:
    admission = admission_of(backend)
    requests = [asking("a", "slow x"), asking("b", "slow x"), asking("c", "y")]
    for request in requests:
        admission.add(request)
        assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert len(admission) == 3
    assert "a" in admission
    assert ends(admission, 1) == {"c": None}
    backend.release_slot.set()
    assert ends(admission, 2) == {"a": None, "b": None}
    assert len(admission) == 0
    assert sorted(backend.compiled) == ["slow x", "y"]
    assert all(request.constraint is not None and request.status is RequestStatus.WAITING for request in requests)
    admission.add(asking("d", "y"))
    assert [request.request_id for request, _ in admission.pop_ready()] == ["d"]
    assert sorted(backend.compiled) == ["slow x", "y"]


def test_the_backend_is_loaded_by_the_first_request() -> None:
    loaded: list[str] = []

    def load() -> FakeBackend:
        loaded.append(threading.current_thread().name)
        return FakeBackend()

    admission = GrammarAdmission(load, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    assert loaded == []
    for request_id in "ab":
        admission.add(asking(request_id, request_id))
    ends(admission, 2)
    assert len(loaded) == 1
    assert loaded[0].startswith("grammar")


def test_a_compile_error_ends_one_request(backend: FakeBackend) -> None:
    admission = admission_of(backend)
    for request_id, regex in (("a", "bad"), ("b", "panic"), ("c", "fine")):
        admission.add(asking(request_id, regex))
    admission.add(asking("d", "fine", [13]))
    errors = ends(admission, 4)
    assert errors["c"] is None
    assert {name: error.code for name, error in errors.items() if error} == {
        "a": "validation_error",
        "b": FAILED,
        "d": FAILED,
    }


class FailingGrammar(FakeGrammar):
    """Raises in one method."""

    def __init__(self, method: str, kind: type[BaseException]) -> None:
        super().__init__()
        setattr(self, method, raising(kind))


class FailingBackend(FakeBackend):
    """Raises where a library may: it compiles, starts a grammar, makes a mask, or takes a token."""

    def __init__(self, place: str, kind: type[BaseException]) -> None:
        super().__init__()
        self._place, self._kind = place, kind

    def compile(self, spec: GrammarSpec) -> FakeCompiled:
        if spec.text == "fine":
            return FakeCompiled()
        if self._place == "compile":
            raising(self._kind)()
        compiled, grammars = FakeCompiled(), itertools.count()

        def start(ending_token_ids: frozenset[int]) -> FakeGrammar:
            is_probe = next(grammars) == 0
            if self._place == "start" and not is_probe:
                raising(self._kind)()
            return FakeGrammar() if is_probe else FailingGrammar(self._place, self._kind)

        compiled.start = start
        return compiled


@pytest.mark.parametrize("kind", EVERY_EXCEPTION, ids=name_of)
@pytest.mark.parametrize("place", ["compile", "start", "fill_bitmask", "accept_tokens"])
def test_whatever_a_library_raises_ends_one_request(place: str, kind: type[BaseException]) -> None:
    admission = admission_of(FailingBackend(place, kind))
    requests = {request_id: asking(request_id, request_id) for request_id in ("failing", "fine")}
    for request in requests.values():
        admission.add(request)
    errors = ends(admission, 2)
    assert errors["fine"] is None
    if place in ("compile", "start"):
        error = errors["failing"]
    else:
        constraint = requests["failing"].constraint
        assert isinstance(constraint, GrammarConstraint)
        constraint.fill(admission_module.new_bitmask(1, VOCAB_SIZE), 0)
        error = constraint.accept(5)
    assert error is not None
    assert (error.code, kind.__name__ in error.message) == (FAILED, True)


def test_delivered_tokens_are_replayed(backend: FakeBackend) -> None:
    admission = admission_of(backend)
    request = asking("a", "x", [5, 6, 7])
    admission.add(request)
    assert ends(admission, 1) == {"a": None}
    assert isinstance(request.constraint, GrammarConstraint)
    grammar: Any = request.constraint._grammar
    assert grammar.token_ids == [5, 6, 7]


@pytest.mark.slow
def test_one_that_takes_too_long_is_refused_and_its_thread_replaced(backend: FakeBackend) -> None:
    admission = admission_of(backend)
    for i in range(admission_module.MAX_THREADS):
        admission._compile_timeout_s = 0.1
        admission.add(asking(f"slow {i}", f"slow {i}"))
        refused = ends(admission, 1)[f"slow {i}"]
        assert refused is not None
        assert refused.code == "validation_error"
        assert "0.1 s to compile" in refused.message
        if i < admission_module.MAX_THREADS - 1:
            admission._compile_timeout_s = DEADLINE_S  # a fast one has to make it, however busy the machine is
            admission.add(asking("fast", f"fast {i}"))
            assert ends(admission, 1) == {"fast": None}
    # As many as there may be threads are given up. Who asks for the same again is refused at once,
    admission.add(asking("again", "slow 0"))
    again = ends(admission, 1)["again"]
    assert again is not None
    assert again.code == "validation_error"
    # and who asks for another waits for a thread in vain.
    admission._queue_timeout_s = 0.1
    admission.add(asking("late", "late"))
    late = ends(admission, 1)["late"]
    assert late is not None
    assert (late.code, late.retryable) == (BUSY, True)
    # The late grammar is kept.
    backend.release_slot.set()
    until(lambda: admission.cache.get(GrammarSpec(GrammarKind.REGEX, "slow 0")) is not None)
    admission.add(asking("back", "slow 0"))
    assert ends(admission, 1) == {"back": None}
    admission.add(asking("new", "new"))
    assert ends(admission, 1) == {"new": None}


def test_a_compile_is_charged_its_computing_and_part_of_its_waiting() -> None:
    """So a busy machine, which makes it wait, is no reason to refuse it."""
    has_computed, may_end = threading.Event(), threading.Event()

    def work(_: Task) -> None:
        started_s = time.thread_time()
        while time.thread_time() - started_s < 0.01:
            pass
        has_computed.set()
        assert may_end.wait(DEADLINE_S)

    task = CompileThreads(1, 1).submit(work)
    assert has_computed.wait(DEADLINE_S)
    assert task.taken_s >= 0.01
    started_s = task.started_s
    assert started_s is not None
    until(lambda: time.monotonic() - started_s > 0.3)
    assert WAITING_SHARE * 0.3 < task.taken_s < 0.5 * (time.monotonic() - started_s)
    may_end.set()


def test_an_abort_forgets_the_request(backend: FakeBackend) -> None:
    admission = admission_of(backend)
    request = asking("a", "slow")
    admission.add(request)
    admission.abort(["a", "unknown"])
    assert (len(admission), request.status) == (0, RequestStatus.FINISHED_ABORTED)
    assert admission.pop_ready() == []
    backend.release_slot.set()
    until(lambda: len(admission.cache) == 1)


def test_a_model_without_an_ending_token_has_no_grammars(backend: FakeBackend) -> None:
    admission = GrammarAdmission(lambda: backend, vocab_size=VOCAB_SIZE, eos_token_ids=[])
    with pytest.raises(ValidationError, match="stop_token_ids"):
        admission.add(asking("a", "x"))


def test_the_cache_drops_the_least_recently_used() -> None:
    cache = GrammarCache(max_bytes=3500, max_entries=3)
    specs = [GrammarSpec(GrammarKind.REGEX, text) for text in "abcd"]
    for spec in specs[:3]:
        cache.put(spec, FakeCompiled())
    assert cache.get(specs[0]) is not None
    cache.put(specs[3], FakeCompiled())
    assert [cache.get(spec) is not None for spec in specs] == [True, False, True, True]
    assert (len(cache), cache.num_bytes) == (3, 3003)
    cache.put(GrammarSpec(GrammarKind.REGEX, "x" * 3000), FakeCompiled())  # larger than all there is
    assert len(cache) == 3
    cache.put(GrammarSpec(GrammarKind.REGEX, "x" * 2000), FakeCompiled())
    assert len(cache) == 1


class Executor:
    """Gives token 5 to every request that has caught up."""

    device_memory_bytes = 0

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        pairs = zip(output.requests, output.num_new_tokens, strict=True)
        return SampledTokens([[5] if r.num_uncomputed_tokens == n else [] for r, n in pairs])


def test_others_continue_while_a_grammar_is_compiled(backend: FakeBackend) -> None:
    scheduler = Scheduler(BlockPool(20, 16), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=99)
    core = EngineCore(scheduler, Executor(), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], grammars=admission_of(backend))

    def add(request_id: str, regex: str | None, max_tokens: int) -> None:
        structured = None if regex is None else StructuredOutputsParams(regex=regex)
        params = SamplingParams(max_tokens=max_tokens, structured_outputs=structured)
        assert (
            core.add_request(EngineCoreRequest(request_id=request_id, prompt_token_ids=[1], sampling_params=params))
            is None
        )

    add("slow", "slow", 3)
    add("aborted", "slow", 3)
    add("plain", None, 30)
    num_tokens = sum(len(output.new_token_ids) for _ in range(30) for output in core.step())
    assert num_tokens == 30
    assert (core.has_work, core.num_unfinished_requests) == (True, 2)
    # With nothing else to do a step waits a moment, and counts: whoever watches sees that the core is alive.
    assert core.step() == []
    core.abort_requests(["aborted"])
    core.check_invariants()
    backend.release_slot.set()
    outputs = []
    until(lambda: bool(outputs.extend(core.step()) or not core.has_work))
    assert [output.request_id for output in outputs] == ["slow"] * 3
    assert outputs[-1].finish_reason is FinishReason.LENGTH
