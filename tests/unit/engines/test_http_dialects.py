"""Each field on its way to llama-server and SGLang; no server is asked."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.errors import ConfigurationError, UnsupportedParameterError
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.other_engines.http import llama, sglang
from penstock.worker.other_engines.http.dialect import Dialect, ServerCall, ServerFacts
from penstock.worker.other_engines.http.options import check_options
from penstock.worker.other_engines.http.server import check_model

DIALECTS: dict[str, Dialect] = {"llama": llama.LlamaDialect(512), "sglang": sglang.SglangDialect()}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_parameter_that_no_mapping_names_is_refused(dialect: str) -> None:
    """``extra_args`` and ``prompt_logprobs`` stand for any field that is added to ``SamplingParams`` later."""
    message = EngineCoreRequest(request_id="r", prompt_token_ids=[1])
    unserved = (SamplingParams(extra_args={"logits_processors": {}}), SamplingParams(prompt_logprobs=2))
    for name, params in zip(("extra_args", "prompt_logprobs"), unserved, strict=True):
        with pytest.raises(UnsupportedParameterError, match=f"^{name}="):
            DIALECTS[dialect].check(message, params)
    DIALECTS[dialect].check(message, SamplingParams(thinking_token_budget=-1))


def _server_call(num_output_tokens: int = 0, **values: Any) -> ServerCall:
    params = SamplingParams(**values)
    return ServerCall([1, 2], params, seed=7, max_new_tokens=5, num_output_tokens=num_output_tokens, is_streamed=True)


def test_llama_servers_words() -> None:
    body = DIALECTS["llama"].body(
        _server_call(temperature=0.5, top_k=-1, repetition_penalty=1.2, logit_bias={3: 2.0}, logprobs=0)
    )
    assert (body["prompt"], body["n_predict"], body["stream"], body["return_tokens"]) == ([1, 2], 5, True, True)
    assert (body["temperature"], body["top_k"], body["repeat_penalty"], body["repeat_last_n"]) == (0.5, 0, 1.2, 512)
    assert (body["logit_bias"], body["n_probs"], body["seed"]) == ([[3, 2.0]], 1, 7)
    # Defaults that its command line may set for all.
    assert (body["min_p"], body["typical_p"], body["presence_penalty"]) == (0.0, 1.0, 0.0)
    assert DIALECTS["llama"].body(_server_call(4))["seed"] not in (7, DIALECTS["llama"].body(_server_call(5))["seed"])
    assert 0 <= DIALECTS["llama"].body(_server_call(4))["seed"] < 2**31


def test_sglangs_words() -> None:
    body = DIALECTS["sglang"].body(_server_call(3, min_tokens=4, stop_token_ids=[9], logit_bias={3: 2.0}, logprobs=2))
    sampling = body["sampling_params"]
    assert (body["input_ids"], body["stream"], body["return_logprob"], body["top_logprobs_num"]) == (
        [1, 2],
        True,
        True,
        2,
    )
    assert (sampling["max_new_tokens"], sampling["min_new_tokens"], sampling["top_k"]) == (5, 1, -1)
    assert (sampling["stop_token_ids"], sampling["logit_bias"]) == ([9], {"3": 2.0})


def _guided(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the field of a schema, with what a llama-server with LLGuidance needs."""
    return {"json_schema": {**schema, "x-guidance": {"whitespace_flexible": False, "lenient": True}}}


@pytest.mark.parametrize(
    ("grammar", "llamas", "sglangs"),
    [
        ({"json": {"type": "array"}}, _guided({"type": "array"}), {"json_schema": '{"type": "array"}'}),
        ({"json": "{}"}, {"json_schema": {}}, {"json_schema": "{}"}),
        ({"json_object": True}, _guided({"type": "object"}), {"json_schema": '{"type": "object"}'}),
        ({"choice": ['a"b', "c.\n"]}, {"grammar": 'root ::= "a\\"b" | "c.\\n"'}, {"regex": '(a"b|c\\.\\\n)'}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"regex": "a+"}, None, {"regex": "a+"}),
    ],
    ids=["json", "any json", "json_object", "choice", "grammar", "regex"],
)
def test_grammars(grammar: dict[str, Any], llamas: dict[str, Any] | None, sglangs: dict[str, Any]) -> None:
    constraint = StructuredOutputsParams(**grammar)
    sampling = DIALECTS["sglang"].body(_server_call(structured_outputs=constraint))["sampling_params"]
    assert sampling.items() >= sglangs.items()
    if llamas is not None:
        assert DIALECTS["llama"].body(_server_call(structured_outputs=constraint)).items() >= llamas.items()


@pytest.mark.parametrize(
    ("dialect", "values", "sentence"),
    [
        ("llama", {"min_tokens": 3}, "min_tokens=3 is not supported by llama-server; leave it at 0"),
        ("sglang", {"allowed_token_ids": [3]}, "allowed_token_ids=[3] is not supported by SGLang; leave it at None"),
        (
            "llama",
            {"structured_outputs": StructuredOutputsParams(regex="a")},
            "structured_outputs.regex is not supported by llama-server; leave it out",
        ),
        (
            "sglang",
            {"structured_outputs": StructuredOutputsParams(json_object=True, whitespace_pattern=" ?")},
            "structured_outputs.whitespace_pattern is not supported by SGLang; leave it out",
        ),
    ],
)
def test_unsupported_parameters_of_a_server_are_refused_by_name(
    dialect: str, values: dict[str, Any], sentence: str
) -> None:
    params = SamplingParams(**values)
    with pytest.raises(UnsupportedParameterError) as caught:
        DIALECTS[dialect].check(EngineCoreRequest(request_id="r", prompt_token_ids=[1]), params)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("dialect", DIALECTS)
def test_hints_that_the_gateway_sets_for_json_are_accepted(dialect: str) -> None:
    grammar = StructuredOutputsParams(
        json={"type": "object"}, disable_any_whitespace=True, disable_additional_properties=True
    )
    message = EngineCoreRequest(request_id="r", prompt_token_ids=[1])
    DIALECTS[dialect].check(message, SamplingParams(structured_outputs=grammar))


def _config(**fields: Any) -> EngineConfig:
    fields = {"model": "/m", "engine": "http", "engine_url": "http://h:8080", **fields}
    return EngineConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"engine_url": ""}, "engine_url is missing: engine 'http' needs the address of a server"),
        ({"engine_url": "h:8080"}, "engine_url must be the address of a server"),
        ({"engine_url": "http://h:99999"}, "engine_url must be the address of a server"),
        ({"engine_python": "/p"}, "engine_python is not for engine 'http'; give --engine vllm"),
        ({"engine": "vllm"}, "engine_url is not for engine 'vllm'; give --engine http"),
        (
            {"dtype": "float32"},
            "dtype 'float32' is for Penstock's engine, not for 'http'; set it in the server's",
        ),
        ({"deterministic": True}, "deterministic True is for Penstock's engine, not for 'http'; leave it out"),
        ({"num_engines_on_host": 2}, "engines must be 1 with engine 'http', got 2"),
        ({"engine_command": "a 'b"}, "engine_command cannot be read: No closing quotation"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_options(_config(**fields))
    assert str(caught.value).startswith(sentence)


def test_a_server_with_another_model_is_refused(tmp_path: Any) -> None:
    config = {"vocab_size": 384, "architectures": ["LlamaForCausalLM"]}
    facts = ServerFacts("1", 4, 512, 2048, 1, vocab_size=382, model="m.gguf", architecture="LlamaForCausalLM")
    # The tokenizer's size, or that of the weights, which may be filled up.
    check_model(facts, config, 382, tmp_path)
    check_model(facts, {"vocab_size": 382}, 380, tmp_path)
    with pytest.raises(ConfigurationError, match=r"has a vocabulary of 382 tokens, and that of model .* 380 or 384"):
        check_model(facts, config, 380, tmp_path)
    with pytest.raises(ConfigurationError, match=r"is a LlamaForCausalLM, and that of model .* a Qwen3ForCausalLM"):
        check_model(facts, {**config, "architectures": ["Qwen3ForCausalLM"]}, 382, tmp_path)
