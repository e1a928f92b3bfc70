"""What a caller is told of the prefix cache, whichever way the request ends."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.shared.broker import Claim
from penstock.shared.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestError, Usage
from penstock.shared.params import SamplingParams
from penstock.worker.serving.generation import Generation
from penstock.worker.serving.segments import Segment


@pytest.fixture
def generation() -> Generation:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1] * 20,
        sampling_params=SamplingParams(max_tokens=3, detokenize=False),
        epoch=1,
    )
    codec = cast(Any, None)  # asked for a detokenizer only
    return Generation(Segment(request, []), codec, Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1))


def test_cached_tokens_are_told_with_the_end(generation: Generation) -> None:
    generation.absorb(EngineCoreOutput("r", [5], num_cached_tokens=16))
    first = generation.take()
    assert first is not None
    assert first.usage is None
    last, _ = generation.absorb(EngineCoreOutput("r", [6], FinishReason.LENGTH, num_cached_tokens=16))
    assert last is not None
    assert last.usage == Usage(num_prompt_tokens=20, num_output_tokens=2, num_cached_tokens=16)


def test_an_end_without_tokens_forgets_none(generation: Generation) -> None:
    generation.absorb(EngineCoreOutput("r", [5], num_cached_tokens=16))
    error = RequestError("engine_step_failed", "boom", True)
    failed, _ = generation.absorb(EngineCoreOutput("r", finish_reason=FinishReason.ERROR, error=error))
    assert failed is not None
    assert failed.usage == Usage(20, 1, 16)


def test_a_deadline_forgets_none(generation: Generation) -> None:
    generation.absorb(EngineCoreOutput("r", [5], num_cached_tokens=16))
    assert generation.cut_off(FinishReason.EXPIRED).usage == Usage(20, 1, 16)
