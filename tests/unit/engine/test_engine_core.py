"""The core with a scripted executor: refusals, resumption, failing steps."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.errors import EngineDeadError
from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.lora import LoRARequest
from penstock.shared.params.pooling import PoolingParams
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import AcceleratorError, SampledTokens, SchedulerOutput

VOCAB_SIZE = 50
EOS = 2


class Script:
    """An executor that gives token 7, or raises an exception of ``failures``, or for one request always."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.poison: str | None = None
        self.token_id = 7
        self.device_memory_bytes = 0
        self.executed: list[dict[str, int]] = []
        self.released: list[list[str]] = []

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        request_ids = [request.request_id for request in output.requests]
        self.executed.append(dict(zip(request_ids, output.num_new_tokens, strict=True)))
        self.released.append(output.released_ids)
        if self.failures:
            raise self.failures.pop(0)
        if self.poison in request_ids:
            raise RuntimeError("boom")
        token_ids = [
            [self.token_id] if request.num_uncomputed_tokens == n else []
            for request, n in zip(output.requests, output.num_new_tokens, strict=True)
        ]
        return SampledTokens(token_ids)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def core(script: Script) -> EngineCore:
    scheduler = Scheduler(BlockPool(8, 4), max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)
    return EngineCore(scheduler, script, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])


def request(request_id: str = "r", **fields: Any) -> EngineCoreRequest:
    values: dict[str, Any] = {"prompt_token_ids": [1, 2], "sampling_params": SamplingParams(max_tokens=3), **fields}
    return EngineCoreRequest(request_id=request_id, **values)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt_token_ids": None}, "validation_error"),
        ({"prompt_token_ids": []}, "validation_error"),
        ({"prompt_token_ids": [1, VOCAB_SIZE]}, "validation_error"),
        ({"prompt_token_ids": [-1]}, "validation_error"),
        ({"output_token_ids": [VOCAB_SIZE]}, "validation_error"),
        ({"prompt_token_ids": [1] * 16}, "prompt_too_long"),
        ({"sampling_params": None}, "validation_error"),
        ({"sampling_params": None, "pooling_params": PoolingParams()}, "unsupported_task"),
        ({"sampling_params": SamplingParams(extra_args={"a": 1})}, "unsupported_parameter"),
        ({"lora_request": LoRARequest("a", 1, "/a")}, "unsupported_parameter"),
    ],
)
def test_a_bad_request_is_answered_and_the_others_continue(core: EngineCore, fields: dict[str, Any], code: str) -> None:
    core.add_request(request("good"))
    answer = core.add_request(request("bad", **fields))
    assert answer is not None
    assert answer.error is not None
    assert (answer.request_id, answer.finish_reason, answer.error.code) == ("bad", FinishReason.ERROR, code)
    assert not answer.error.retryable
    assert core.step() == [EngineCoreOutput("good", [7])]


def test_a_prompt_that_leaves_room_for_one_token_is_served(core: EngineCore) -> None:
    assert core.add_request(request(prompt_token_ids=[1] * 15)) is None
    assert core.step() == []
    assert core.step() == [EngineCoreOutput("r", [7], FinishReason.LENGTH)]
    assert not core.has_work


def test_delivered_tokens_count_and_are_not_repeated(core: EngineCore) -> None:
    core.add_request(request(output_token_ids=[5, 6]))
    assert core.step() == [EngineCoreOutput("r", [7], FinishReason.LENGTH)]


@pytest.mark.parametrize(
    ("delivered", "reason", "stop_reason"),
    [([5, 5, 5], FinishReason.LENGTH, None), ([EOS], FinishReason.STOP, None), ([9], FinishReason.STOP, 9)],
)
def test_a_request_that_was_complete_when_its_engine_died_ends_at_once(
    core: EngineCore, delivered: list[int], reason: FinishReason, stop_reason: int | None
) -> None:
    params = SamplingParams(max_tokens=3, stop_token_ids=[9])
    answer = core.add_request(request(sampling_params=params, output_token_ids=delivered))
    assert answer == EngineCoreOutput("r", [], reason, stop_reason)
    assert not core.has_work


def test_the_stopping_token_is_delivered(core: EngineCore, script: Script) -> None:
    core.add_request(request())
    script.token_id = EOS
    assert core.step() == [EngineCoreOutput("r", [EOS], FinishReason.STOP)]


def test_a_request_that_is_already_here_is_not_added_twice(core: EngineCore) -> None:
    core.add_request(request())
    assert core.add_request(request()) is None
    assert core.step() == [EngineCoreOutput("r", [7])]


def run(core: EngineCore) -> dict[str, EngineCoreOutput]:
    """Run to the end; the tokens of each request, and how it ended."""
    results: dict[str, EngineCoreOutput] = {}
    while core.has_work:
        for output in core.step():
            result = results.setdefault(output.request_id, EngineCoreOutput(output.request_id))
            result.new_token_ids = result.new_token_ids + output.new_token_ids
            result.finish_reason, result.error = output.finish_reason, output.error
        core.check_invariants()
    return results


def test_a_request_that_raises_alone_too_fails_alone(core: EngineCore, script: Script) -> None:
    script.poison = "b"
    for request_id in "abc":
        core.add_request(request(request_id))
    results = run(core)
    failure = results["b"].error
    assert failure is not None
    assert (failure.code, failure.retryable) == ("engine_step_failed", True)
    assert "RuntimeError" in failure.message
    for request_id in "ac":
        assert results[request_id] == EngineCoreOutput(request_id, [7, 7, 7], FinishReason.LENGTH)


def test_a_batch_that_raises_once_does_no_harm(core: EngineCore, script: Script) -> None:
    script.failures = [RuntimeError("boom")]
    for request_id in "abc":
        core.add_request(request(request_id))
    assert run(core) == {id: EngineCoreOutput(id, [7, 7, 7], FinishReason.LENGTH) for id in "abc"}


def test_the_requests_of_a_failed_batch_run_alone_with_the_same_tokens(core: EngineCore, script: Script) -> None:
    core.add_request(request("a", prompt_token_ids=[1, 2, 3]))
    core.add_request(request("b", prompt_token_ids=[4] * 9))
    script.failures = [RuntimeError("boom")]
    assert core.step() == []
    assert core.step() == [EngineCoreOutput("a", [7])]
    assert core.step() == []
    assert script.executed == [{"a": 3, "b": 5}, {"a": 3}, {"b": 5}]


def test_a_request_that_was_aborted_meanwhile_is_not_tried(core: EngineCore, script: Script) -> None:
    for request_id in "abc":
        core.add_request(request(request_id))
    script.failures = [RuntimeError("boom")]
    core.step()
    core.abort_requests(["a"])
    core.add_request(request("a"))
    assert core.step() == [EngineCoreOutput("b", [7])]
    core.check_invariants()
    assert [output.request_id for output in core.step()] == ["b", "c"]
    assert run(core)["a"].new_token_ids == [7, 7, 7]


def test_outputs_released_before_a_failed_batch_are_still_delivered(core: EngineCore, script: Script) -> None:
    core.add_request(request("old"))
    core.step()
    core.abort_requests(["old"])
    core.add_request(request("a"))
    core.add_request(request("b"))
    script.failures = [RuntimeError("boom")]
    core.step()
    core.step()
    core.step()
    assert script.released == [[], ["old"], ["old"], []]


def test_a_failure_of_the_accelerator_ends_the_batch(core: EngineCore, script: Script) -> None:
    for request_id in "abc":
        core.add_request(request(request_id))
    script.failures = [AcceleratorError("lost")]
    assert [(o.request_id, o.error and o.error.code) for o in core.step()] == [
        ("a", "engine_step_failed"),
        ("b", "engine_step_failed"),
    ]
    core.check_invariants()
    assert core.step() == [EngineCoreOutput("c", [7])]


def test_an_accelerator_that_keeps_failing_ends_the_core(core: EngineCore, script: Script) -> None:
    script.failures = [AcceleratorError("lost")] * 3
    for request_id in "ab":
        core.add_request(request(request_id))
        assert core.step()[0].error is not None
    core.add_request(request("c"))
    with pytest.raises(EngineDeadError):
        core.step()


def test_an_accelerator_that_recovers_is_forgiven(core: EngineCore, script: Script) -> None:
    for _ in range(4):
        script.failures = [AcceleratorError("hiccup")]
        core.add_request(request())
        core.step()
        core.add_request(request())
        assert core.step() == [EngineCoreOutput("r", [7])]
        core.abort_requests(["r"])
