"""The answer of /v1/embeddings, given over HTTP and as a row of a batch."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.producer.openai.endpoints import prepare
from penstock.producer.openai.errors import OpenAIError, error_of
from penstock.producer.openai.pooling import PreparedEmbeddings, ScoreBody
from penstock.producer.results import CompletionOutput, PoolingOutput, RequestOutput
from penstock.shared.errors import ValidationError
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.params.pooling import Pooled

POOLED = Pooled(data=b"\x00\x00\x80?\x00\x00\x00\xc0", shape=(2,))


def prepared(**body: Any) -> PreparedEmbeddings:
    request = prepare("/v1/embeddings", {"model": "m", **body})
    assert isinstance(request, PreparedEmbeddings)
    return request


def output(pooled: Pooled | None, reason: FinishReason = FinishReason.STOP) -> RequestOutput:
    pooling = None if pooled is None else PoolingOutput(pooled=pooled)
    answer = CompletionOutput(index=0, text="", token_ids=[], finish_reason=reason, pooled=pooling)
    return RequestOutput(request_id="embd-1", model="m", prompt=None, outputs=[answer], usage=Usage(3, 0))


def test_vectors_are_numbers_or_base64() -> None:
    floats = prepared(input=["a", [1, 2]]).answer(output(POOLED), output(POOLED))
    assert [(one.index, one.embedding) for one in floats.data] == [(0, [1.0, -2.0]), (1, [1.0, -2.0])]
    assert (floats.id, floats.usage.prompt_tokens, floats.usage.total_tokens) == ("embd-1", 6, 6)
    (only,) = prepared(input="a", encoding_format="base64").answer(output(POOLED)).data
    assert only.embedding == "AACAPwAAAMA="


@pytest.mark.parametrize(
    ("texts", "prompts"), [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2]], [[1], [2]])]
)
def test_input_is_one_text_or_many(texts: Any, prompts: list[Any]) -> None:
    request = prepared(input=texts, dimensions=8, prompt_name="query", band="batch")
    assert list(request.prompts) == prompts
    assert (request.params.task, request.params.dimensions, request.params.prompt_name) == ("embed", 8, "query")
    assert request.options.get("band") == "batch"


@pytest.mark.parametrize(
    ("texts", "field"), [("a", "input"), ([1, 2], "input"), (["a"], "input[0]"), ([[1, 2]], "input[0]")]
)
def test_the_only_text_of_a_list_is_named_by_its_place(texts: Any, field: str) -> None:
    """The client, which was given one prompt, calls it by no number."""
    with pytest.raises(ValidationError) as caught, prepared(input=texts).naming_fields():
        raise ValidationError("prompt[1] must be in [0, 382), got 400")
    assert str(caught.value) == f"{field}[1] must be in [0, 382), got 400"


@pytest.mark.parametrize(
    ("sides", "field"),
    [
        ({"text_1": "", "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"queries": "a", "documents": ["a", ""]}, "documents[1]"),
        ({"text_1": "a", "text_2": ["a"] * 2049}, "text_2"),
    ],
)
def test_an_empty_side_of_pairs_is_named(sides: dict[str, Any], field: str) -> None:
    with pytest.raises(OpenAIError) as caught:
        ScoreBody(**sides).pairs()
    assert caught.value.param == field


def test_engine_errors_use_the_bodys_field_names() -> None:
    for message, expected in (
        ("prompt[1] has 502 tokens", "input[1] has 502 tokens"),
        ("prompt_name must be left out", "prompt_name must be left out"),
        ("lora_request 'emb': no adapters here", "model 'emb': no adapters here"),
        ("the prompt is odd", "the prompt is odd"),
    ):
        with pytest.raises(ValidationError) as caught, prepared(input="a").naming_fields():
            raise ValidationError(message)
        assert str(caught.value) == expected
    assert error_of(ValidationError("the prompt is odd")).param is None


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.CANCELLED, 499), (FinishReason.EXPIRED, 408)])
def test_an_end_without_a_result_is_an_error(reason: FinishReason, status: int) -> None:
    with pytest.raises(OpenAIError) as caught:
        prepared(input="a").answer(output(None, reason))
    assert caught.value.status == status
