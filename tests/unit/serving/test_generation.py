"""What a caller is told, however outputs are gathered into deltas, and whichever way the request ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.shared.broker import Claim
from penstock.shared.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestError, Usage
from penstock.shared.params import SamplingParams
from penstock.worker.serving.generation import Generation
from penstock.worker.serving.segments import Segment
from penstock.worker.text.tokenizer import TextCodec


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


@pytest.fixture(scope="module")
def codec(demo_model: Path) -> TextCodec:
    return TextCodec.load(demo_model)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_text_is_that_of_the_whole_however_it_is_gathered(codec: TextCodec, data: st.DataObject) -> None:
    text = data.draw(st.text("ab déjà 日本🙂", max_size=24))
    token_ids = codec.encode(text + "x")
    stop = data.draw(st.sampled_from([None, "b", "a d", "日"]))
    params = SamplingParams(max_tokens=99, seed=1, stop=[stop] if stop else None)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, epoch=1)
    generation = Generation(Segment(request, []), codec, Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1))
    deltas = []
    for number, token_id in enumerate(token_ids):
        end = FinishReason.LENGTH if number == len(token_ids) - 1 else None
        output = EngineCoreOutput("r", [token_id], end)
        generation.timing.note_output(output, float(number))
        delta, stop_core = generation.absorb(output)
        if delta is None and data.draw(st.booleans()):
            delta = generation.take()
        if delta is not None:
            deltas.append(delta)
        if generation.finished:
            assert stop_core == (end is None)
            break
    whole = codec.detokenizer(skip_special_tokens=True)
    expected = whole.add(token_ids) + whole.flush()
    expected = expected.partition(stop)[0] if stop else expected
    assert "".join(delta.text for delta in deltas) == expected
    assert [token_id for delta in deltas for token_id in delta.token_ids] == token_ids[: deltas[-1].next_index]
    assert [delta.index for delta in deltas] == [0, *(delta.next_index for delta in deltas[:-1])]
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].stop_reason == (stop if stop and stop in text + "x" else None)


def test_the_token_that_ends_it_is_a_sign_and_no_text(codec: TextCodec) -> None:
    params = SamplingParams(max_tokens=99, seed=1)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, epoch=1)
    generation = Generation(Segment(request, []), codec, Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1))
    a, b, end = codec.encode("ab")[0], codec.encode("b")[0], codec.encode("z")[0]
    assert generation.absorb(EngineCoreOutput("r", [a])) == (None, False)
    assert generation.absorb(EngineCoreOutput("r", [b])) == (None, False)
    delta, _ = generation.absorb(EngineCoreOutput("r", [end], FinishReason.STOP))
    assert delta is not None
    whole = codec.detokenizer(skip_special_tokens=True)
    assert delta.text == whole.add([a, b]) + whole.flush()
    assert delta.token_ids == [a, b, end]
