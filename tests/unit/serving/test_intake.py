"""A claimed request before the core has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.shared.broker import Claim
from penstock.shared.errors import UnsupportedParameterError, ValidationError
from penstock.shared.messages.core import Ready
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.lora import LoRARequest, LoraSetup
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.serving.requests.intake import Intake
from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.tokenizer import TextCodec

THINK, ANSWER = 3, 4
MESSAGES = [{"role": "user", "content": "a"}]


def ready(engine: str = "penstock") -> Ready:
    return Ready(
        model_folder="/m",
        architecture="A",
        max_model_len=20,
        num_blocks=9,
        block_size=16,
        dtype="float32",
        device="cpu",
        vocab_size=9,
        eos_token_ids=[2],
        engine=engine,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    word_level = Tokenizer(
        models.WordLevel({"a": 0, "b": 1, "</s>": 2, "<think>": THINK, "</think>": ANSWER}, unk_token="b")
    )
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return word_level


async def prepared(intake: Intake, params: SamplingParams, **prompt: Any) -> EngineCoreRequest:
    request = EngineCoreRequest(request_id="r", sampling_params=params, **prompt)
    payload = msgspec.msgpack.encode(request)
    return await intake.prepare(Claim("r", payload, epoch=1, num_logged_tokens=0, attempt=1))


@pytest.mark.parametrize(
    ("parser", "engine", "prompt", "params", "waits"),
    [
        ("auto", "penstock", {"messages": MESSAGES}, {}, True),
        ("none", "penstock", {"messages": MESSAGES}, {}, False),
        ("auto", "vllm", {"messages": MESSAGES}, {}, None),
        ("auto", "penstock", {"prompt": "a b"}, {}, False),
        ("auto", "penstock", {"prompt": "a <think> b"}, {}, True),
        ("none", "penstock", {"prompt_token_ids": [0, THINK]}, {}, True),
        ("auto", "penstock", {"prompt": "<think> b </think>"}, {}, False),
        ("auto", "penstock", {"prompt": "a b"}, {"thinking_token_budget": 4}, True),
        ("auto", "penstock", {"messages": MESSAGES}, {"enable_in_reasoning": True}, False),
        ("none", "penstock", {"prompt": "a b"}, {"enable_in_reasoning": False}, True),
    ],
)
async def test_a_grammar_starts_after_the_thinking(
    tokenizer: Tokenizer, parser: str, engine: str, prompt: dict[str, Any], params: dict[str, Any], waits: bool | None
) -> None:
    template = ChatTemplate("{{ messages[0].content }} {# <think></think> #}", {})
    intake = Intake(TextCodec(tokenizer, template, reasoning_parser=parser), ready(engine))
    grammar = StructuredOutputsParams(regex="a", enable_in_reasoning=params.pop("enable_in_reasoning", None))
    request = await prepared(intake, SamplingParams(structured_outputs=grammar, **params), **prompt)
    assert request.sampling_params is not None
    constraint = request.sampling_params.structured_outputs
    assert constraint is not None
    assert constraint.enable_in_reasoning is (None if waits is None else not waits)
    assert request.sampling_params.think_token_ids == ((THINK, ANSWER) if waits else None)


async def test_an_adapter_needs_an_engine_that_serves_them(tokenizer: Tokenizer) -> None:
    intake = Intake(TextCodec(tokenizer, None), ready())
    adapter = LoRARequest("cats", 1, "/cats", digest="c" * 64)
    with pytest.raises(ValidationError, match="this engine serves no adapters; start it with --enable-lora"):
        await prepared(intake, SamplingParams(), prompt="a b", lora_request=adapter)


async def test_the_core_gets_the_adapter_as_it_was_enqueued(tokenizer: Tokenizer) -> None:
    intake = Intake(TextCodec(tokenizer, None), msgspec.structs.replace(ready(), lora=LoraSetup(max_loras=1)))
    adapter = LoRARequest("cats", 1, "/cats", digest="c" * 64)
    assert (await prepared(intake, SamplingParams(), prompt="a b", lora_request=adapter)).lora_request == adapter


@pytest.mark.parametrize(
    ("engine", "policy", "refusal"),
    [
        ("penstock", "fcfs", "priority: this engine orders requests by arrival .* --scheduling-policy priority"),
        ("vllm", "fcfs", "priority: this engine orders requests by arrival .* --scheduling-policy priority"),
        ("http", "", "priority: engine 'http' orders requests by arrival; leave it at 0, or choose a band"),
        ("penstock", "priority", None),
        ("vllm", "priority", None),
        ("penstock", "my_orders:ShortestFirst", None),
        ("penstock", "shortest", None),
    ],
)
async def test_priority_needs_an_engine_that_does_not_order_by_arrival(
    tokenizer: Tokenizer, engine: str, policy: str, refusal: str | None
) -> None:
    intake = Intake(TextCodec(tokenizer, None), msgspec.structs.replace(ready(engine), scheduling_policy=policy))
    assert (await prepared(intake, SamplingParams(), prompt="a b")).priority == 0
    if refusal is None:
        assert (await prepared(intake, SamplingParams(), prompt="a b", priority=-1)).priority == -1
        return
    for priority in (-1, 3):
        with pytest.raises(UnsupportedParameterError, match=refusal):
            await prepared(intake, SamplingParams(), prompt="a b", priority=priority)
