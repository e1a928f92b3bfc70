"""The same requests one batch at a time and one batch ahead: the same tokens, whatever they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.shared.broker import Claim
from penstock.shared.control.engine import CheckInvariants, Invariants, Sleep, SleepState, WakeUp
from penstock.shared.messages.core import AbortRequests, Ready, UtilityCall
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import STEP_FAILED, EngineCore
from penstock.worker.engine.core.in_flight import LookaheadCore
from penstock.worker.engine.core.step_input import IntArray
from penstock.worker.engine.execution.overlap import FeedingRunner, PinnedCopy
from penstock.worker.engine.scheduling.batches import BatchQueue
from penstock.worker.serving.requests.generation import Generation
from penstock.worker.serving.requests.segments import Segment
from penstock.worker.text.tokenizer import TextCodec

from ....conftest import DEMO_MODEL
from ..harness import CoreProcess, Gate, request
from ..mixed_load import KINDS, assert_equal, config, requests, run, too_many


class Late:
    """Copies whose numbers the host has when it waits for them, and not before.

    Attributes:
        most_unread: most copies that were under way at the same time.
        failing: number of the copy that fails.
    """

    def __init__(self, failing: int | None = None) -> None:
        self._num_begun = self._num_unread = self.most_unread = 0
        self.failing = failing

    def __call__(self, numbers: torch.Tensor) -> LateCopy:
        self._num_begun += 1
        self._num_unread += 1
        self.most_unread = max(self.most_unread, self._num_unread)
        return LateCopy(self, numbers, self._num_begun)

    def read(self, number: int) -> None:
        self._num_unread -= 1
        if number == self.failing:
            raise torch.AcceleratorError("lost")


class LateCopy:
    def __init__(self, late: Late, numbers: torch.Tensor, number: int) -> None:
        self._late, self._numbers, self._number = late, numbers, number

    def wait(self) -> IntArray:
        self._late.read(self._number)
        return PinnedCopy(self._numbers).wait()


def fed_core(late: Late, **options: Any) -> LookaheadCore:
    """A core as on a GPU, whose steps feed each other."""
    engine = build_engine(config(async_scheduling=True, **options), DEMO_MODEL)
    assert isinstance(engine.core, LookaheadCore)
    engine.core._batch_queue = BatchQueue(FeedingRunner(engine.runner, late))
    return engine.core


@pytest.mark.parametrize("options", [{}, {"scheduling_policy": "priority", "enable_prefix_caching": False}], ids=str)
def test_tokens_are_those_of_the_plain_step(options: dict[str, Any]) -> None:
    plain, ahead = (
        build_engine(config(async_scheduling=is_ahead, **options), DEMO_MODEL).core for is_ahead in (False, True)
    )
    assert isinstance(ahead, LookaheadCore)
    assert ahead.step_fn == ahead.step_with_batch_queue
    late = Late()
    expected = run(plain, requests())
    for core in (ahead, fed_core(late, **options)):
        outputs = run(core, requests())
        assert core.scheduler.stats().num_preemptions > 0
        assert_equal(outputs, expected)
    assert late.most_unread == 2, "no step was launched before the tokens of the one before were read"


# How an answer ends, besides a stop string of its own text, which spans tokens.
ENDINGS: list[dict[str, Any]] = [
    {},
    {"include_stop_str_in_output": True},
    {"min_tokens": 20},
    {"min_tokens": 20, "include_stop_str_in_output": True},
    {"max_tokens": 1},
    {"stop_token_ids": [*range(20, 200)]},
    {"stop_token_ids": [*range(20, 200)], "min_tokens": 7, "include_stop_str_in_output": True},
    {"presence_penalty": 0.5},
]


def ending_request(name: str, fields: dict[str, Any]) -> EngineCoreRequest:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **fields})
    return EngineCoreRequest(request_id=name, prompt_token_ids=[5, 70, 90], sampling_params=params)


def serve(core: EngineCore, messages: list[EngineCoreRequest]) -> dict[str, Delta]:
    """Serve as a worker process does, which aborts a request once its stop string is complete."""
    codec = TextCodec.load(DEMO_MODEL)
    open_ones: dict[str, Generation] = {}
    for message in messages:
        assert core.add_request(message) is None
        claim = Claim(message.request_id, b"", epoch=1, num_logged_tokens=0, attempt=1)
        open_ones[message.request_id] = Generation(Segment(message, []), codec, claim)
    wholes = {message.request_id: Delta() for message in messages}
    while core.has_work:
        for output in core.step_fn():
            assert output.error is None, output.error
            generation = open_ones[output.request_id]
            delta, must_abort = generation.absorb(output)
            if delta is not None:
                wholes[output.request_id] = wholes[output.request_id].followed_by(delta)
            if must_abort:
                core.abort_requests([output.request_id])
            if generation.finished:
                del open_ones[output.request_id]
        core.check_invariants()
    assert not open_ones
    return {name: msgspec.structs.replace(delta, stats=None) for name, delta in wholes.items()}


def test_stop_strings_end_a_text_at_the_same_character() -> None:
    """Compare with the plain step, and with the text without stop strings: later tokens of the engine are dropped."""
    plain, ahead = (build_engine(config(async_scheduling=is_ahead), DEMO_MODEL).core for is_ahead in (False, True))
    cores = [plain, ahead, fed_core(Late())]
    kinds = {
        f"{number}-{heat}": {"temperature": heat, "seed": number, **fields}
        for number, fields in enumerate(ENDINGS)
        for heat in (0.0, 1.0)
    }
    free = {name: {"temperature": kind["temperature"], "seed": kind["seed"]} for name, kind in kinds.items()}
    free = {name: kind | {"presence_penalty": kinds[name].get("presence_penalty", 0.0)} for name, kind in free.items()}
    texts = {name: delta.text for name, delta in serve(plain, [ending_request(*item) for item in free.items()]).items()}
    stops = {name: text[12:15] for name, text in texts.items()}
    assert all(len(stop) == 3 for stop in stops.values())
    messages = [ending_request(name, kind | {"stop": [stops[name]]}) for name, kind in kinds.items()]
    expected, *others = (serve(core, messages) for core in cores)
    assert others == [expected, expected]
    num_stopped = 0
    for name, delta in expected.items():
        kind = kinds[name]
        if kind.keys() & {"min_tokens", "max_tokens", "stop_token_ids"}:
            continue
        end = texts[name].find(stops[name]) + 3 * bool(kind.get("include_stop_str_in_output"))
        assert (delta.text, delta.stop_reason) == (texts[name][:end], stops[name])
        num_stopped += 1
    assert num_stopped == 6


def test_requests_that_need_earlier_tokens_wait_for_them() -> None:
    """Steps of other requests are launched before the tokens of the step before are read."""
    late = Late()
    plain, fed = build_engine(config(), DEMO_MODEL).core, fed_core(late)
    feeding: list[int] = []
    for number, kind in enumerate(KINDS):
        late.most_unread = 0
        fields = {"max_tokens": 12, "ignore_eos": True, "seed": number, **kind}
        messages = [
            EngineCoreRequest(
                request_id=f"{number}-{row}",
                prompt_token_ids=[5 + number, 70 + row],
                sampling_params=SamplingParams(**fields),
            )
            for row in range(2)
        ]
        assert_equal(run(fed, messages), run(plain, messages))
        if late.most_unread == 2:
            feeding.append(number)
    # Not penalties, bad words of two tokens, log probabilities, and grammars.
    assert feeding == [0, 1, 2, 4, 7]


def test_tokens_that_cannot_be_read_end_their_requests() -> None:
    """Requests of the step that was launched meanwhile end as well, and the engine continues."""
    core = fed_core(Late(failing=6))
    for message in too_many():
        core.add_request(message)
    outputs = [output for _ in range(8) for output in core.step_fn()]
    failed = {output.request_id for output in outputs if output.error is not None}
    assert {output.error.code for output in outputs if output.error is not None} == {STEP_FAILED}
    assert failed
    core.check_invariants()
    rest = [message for message in too_many() if message.request_id in failed]
    plain = build_engine(config(), DEMO_MODEL).core
    while core.has_work:
        core.step_fn()
    assert_equal(run(core, rest), run(plain, [message for message in too_many() if message.request_id in failed]))


def test_calls_and_aborts_run_between_batches(core_process: CoreProcess, gate: Gate, gated_model: Path) -> None:
    """No batch is in flight during a call, and an engine emptied by an abort can sleep immediately."""
    gated = config(model=str(gated_model), trust_remote_code=True, async_scheduling=True)
    assert isinstance(core_process.start(gated.encode()), Ready)
    for number in range(4):
        core_process.send(request(str(number), [5 + number] * 20, max_tokens=60))
    gate.await_arrival()  # a batch is in flight
    core_process.send(UtilityCall(1, CheckInvariants()))
    core_process.send(AbortRequests([str(number) for number in range(4)]))
    core_process.send(UtilityCall(2, Sleep(level=1)))
    gate.open()
    told = core_process.answer()
    assert isinstance(told.answer, Invariants), told.error
    assert told.answer.num_running_reqs + told.answer.num_waiting_reqs == 4
    assert core_process.answer().error is None
    assert core_process.call(WakeUp()).answer == SleepState()
    core_process.send(request("after", [5] * 20, max_tokens=3))
    (tokens,) = core_process.collect(1).values()
    assert [output.request_id for output in tokens] == ["after"] * 3
