"""Each field of a request on its way to vLLM; vLLM itself is not asked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.errors import UnsupportedParameterError
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.pooling import PoolingParams
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.other_engines.vllm import conversion as mapping
from penstock.worker.other_engines.vllm.conversion import (
    cache_salt_of,
    check_request,
    grammar_of,
    vllm_params,
    vllm_pooling_params,
)


def test_every_grammar_field_is_passed_or_refused() -> None:
    grammars = (*mapping.GRAMMAR_FIELDS, *mapping.GRAMMAR_FIELDS_REFUSED)
    assert sorted(grammars) == sorted(StructuredOutputsParams.__struct_fields__)


def test_delivered_tokens_count_as_prompt() -> None:
    params = SamplingParams(max_tokens=32, min_tokens=10, seed=7, prompt_logprobs=2, stop="a", stop_token_ids=[4])
    fresh, resumed, late = vllm_params(params, 0), vllm_params(params, 4), vllm_params(params, 12)
    assert (fresh["max_tokens"], fresh["min_tokens"], fresh["seed"], fresh["prompt_logprobs"]) == (32, 10, 7, 2)
    assert (resumed["max_tokens"], resumed["min_tokens"], resumed["prompt_logprobs"]) == (28, 6, None)
    assert (late["max_tokens"], late["min_tokens"]) == (20, 0)
    # Drawn by other numbers than the first tokens were, and the same ones each time.
    assert len({fresh["seed"], resumed["seed"], late["seed"]}) == 3
    assert resumed == vllm_params(params, 4)
    assert resumed["stop_token_ids"] == [4]
    assert "stop" not in resumed
    assert vllm_params(SamplingParams(max_tokens=None, top_k=-1, seed=1), 3)["max_tokens"] is None
    assert vllm_params(SamplingParams(top_k=-1), 0)["top_k"] == 0


def test_pooling_parameters_and_the_second_text_are_passed_on() -> None:
    params = PoolingParams(dimensions=8, use_activation=False, skip_reading_prefix_cache=True)
    same = {"dimensions": 8, "use_activation": False, "skip_reading_prefix_cache": True}
    assert vllm_pooling_params(params, "embed", None) == {**same, "task": "embed"}
    pair = vllm_pooling_params(PoolingParams(task="classify"), "embed", (3, 7))
    assert (pair["task"], pair["extra_kwargs"]) == ("classify", {"compressed_token_type_ids": (3, 7)})


def _request(params: SamplingParams, **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, **fields)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"thinking_token_budget": 8}, "thinking_token_budget=8 is not supported by engine 'vllm'"),
        (
            {"structured_outputs": StructuredOutputsParams(json_object=True, disable_any_whitespace=True)},
            "structured_outputs.disable_any_whitespace: vLLM sets it for all requests of an engine",
        ),
        (
            {"structured_outputs": StructuredOutputsParams(json_object=True, enable_in_reasoning=False)},
            "structured_outputs.enable_in_reasoning: vLLM sets it for all requests of an engine",
        ),
    ],
)
def test_unsupported_parameters_of_vllm_are_refused_by_name(values: dict[str, Any], sentence: str) -> None:
    params = SamplingParams(**values)
    with pytest.raises(UnsupportedParameterError) as caught:
        check_request(_request(params), params)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("values", "is_exact"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}}, True),
        ({"temperature": 0.0, "presence_penalty": 0.5}, False),
        ({"temperature": 0.0, "frequency_penalty": 0.5}, False),
        ({"temperature": 0.0, "bad_words": ["a"], "bad_words_token_ids": [[3], [4]]}, True),
        ({"temperature": 0.0, "bad_words": ["a"], "bad_words_token_ids": [[3], [4, 5]]}, False),
        ({"temperature": 0.5, "seed": 3}, False),
    ],
)
def test_an_exact_resume_is_refused_where_it_cannot_be(values: dict[str, Any], is_exact: bool) -> None:
    params = SamplingParams(**values)
    check_request(_request(params), params)
    demanding = _request(params, resume="exact")
    if is_exact:
        check_request(demanding, params)
    else:
        with pytest.raises(UnsupportedParameterError, match=r"^resume='exact'"):
            check_request(demanding, params)


def test_log_probabilities_of_prompts_are_refused_beside_adapters() -> None:
    params = SamplingParams(prompt_logprobs=1)
    check_request(_request(params), params)
    with pytest.raises(UnsupportedParameterError, match=r"^prompt_logprobs: vLLM does not compute them"):
        check_request(_request(params), params, has_adapters=True)


def test_the_grammar_of_the_request_is_passed_on() -> None:
    assert grammar_of(StructuredOutputsParams(regex="a+")) == {"regex": "a+"}
    assert grammar_of(StructuredOutputsParams(json_object=True)) == {"json_object": True}


def test_tenants_share_no_blocks() -> None:
    request = _request(SamplingParams(), tenant="a", cache_salt="b")
    salts = {
        cache_salt_of(msgspec.structs.replace(request, tenant=tenant, cache_salt=salt))
        for tenant, salt in (("a", "b"), ("a", None), ("b", "a"), ('a","b', None))
    }
    assert len(salts) == 4
