"""The gateway as users of the `openai` package see it: a real process, on the shared deployment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from penstock.ops.local.server import LocalGateway
from penstock.producer import Client
from penstock.shared.queue.policy import QueuePolicy, TenantPolicy

from ...gate import Gate
from ...processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

COUNT = "count from four to nine:"
COUNTED = " four five six seven eight nine."
MESSAGES: Any = [{"role": "user", "content": COUNT}]


@pytest.fixture
def sdk(gateway: LocalGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, timeout=DEADLINE_S) as sdk:
        yield sdk


@pytest.fixture
async def async_sdk(gateway: LocalGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, timeout=DEADLINE_S) as sdk:
        yield sdk


def test_a_chat_completion(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", COUNTED, "stop")
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id.startswith("chatcmpl-")
    assert (answer.model, answer.object) == ("demo", "chat.completion")


def test_a_chat_stream_with_usage_and_several_answers(sdk: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "count from four"}, {"type": "text", "text": "to nine:"}]
    stream = sdk.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": parts}],
        temperature=0,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
        stop=["seven"],
    )
    chunks = list(stream)
    texts, reasons, roles = ["", "", ""], ["", "", ""], [0, 0, 0]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            roles[choice.index] += choice.delta.role == "assistant"
    assert (len(set(texts)), reasons, roles) == (1, ["stop"] * 3, [1, 1, 1])
    assert "seven" not in texts[0]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3


def test_usage_counts_accepted_prediction_tokens(sdk: openai.OpenAI) -> None:
    """Two tokens that were not predicted find the prediction again where the answer leaves it."""
    plain = sdk.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    assert plain.usage.completion_tokens == 8  # and the end
    for text, accepted, rejected in (
        (COUNTED, 7, 0),
        (COUNTED.replace("five", "ten"), 4, 3),
        (" seven eight nine.", 2, 2),
        ("zero", 0, 1),
    ):
        prediction: Any = {"type": "content", "content": [{"type": "text", "text": text}]}
        fields: Any = {
            "model": "demo",
            "messages": MESSAGES,
            "temperature": 0,
            "prediction": prediction,
            "logprobs": True,
        }
        answer = sdk.chat.completions.create(**fields)
        assert answer.choices[0].message.content == COUNTED
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (accepted, rejected)
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        chunks = list(sdk.chat.completions.create(**fields, n=2, stream=True, stream_options={"include_usage": True}))
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.accepted_prediction_tokens == 2 * accepted
        assert usage.completion_tokens_details.rejected_prediction_tokens == 2 * rejected


def test_log_probabilities_have_texts_and_bytes(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2, max_completion_tokens=4
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert "".join(token.token for token in tokens) == choice.message.content
    assert bytes(byte for token in tokens for byte in token.bytes or ()).decode() == choice.message.content
    assert all(token.top_logprobs[0].token == token.token and len(token.top_logprobs) == 2 for token in tokens)

    whole = sdk.completions.create(model="demo", prompt=COUNT, temperature=0, logprobs=1, echo=True, max_tokens=4)
    logprobs = whole.choices[0].logprobs
    assert whole.choices[0].text == COUNT + str(choice.message.content)
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == "<s>" + whole.choices[0].text
    assert (logprobs.token_logprobs or [0])[0] is None
    tokens_of = sdk.post("/../tokenize", cast_to=object, body={"prompt": COUNT, "return_token_strs": True})
    assert logprobs.tokens is not None
    assert tokens_of["token_strs"] == logprobs.tokens[: tokens_of["count"]]  # type: ignore[index]  # JSON, untyped


async def test_completions_of_several_prompts_as_text_and_as_token_ids(async_sdk: openai.AsyncOpenAI) -> None:
    prompts = ["four plus two is", COUNT]
    whole = await async_sdk.completions.create(model="demo", prompt=prompts, n=2, temperature=0, seed=7, max_tokens=64)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == [" six.", " six.", COUNTED, COUNTED]
    stream = await async_sdk.completions.create(
        model="demo", prompt=prompts, n=2, temperature=0, max_tokens=64, stream=True
    )
    texts = ["", "", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [" six.", " six.", COUNTED, COUNTED]
    tokenized: Any = await async_sdk.post("/../tokenize", cast_to=object, body={"prompt": COUNT})
    echoed = await async_sdk.completions.create(
        model="demo", prompt=tokenized["tokens"], temperature=0, echo=True, max_tokens=64
    )
    assert echoed.choices[0].text == "<s>" + COUNT + COUNTED
    text: Any = await async_sdk.post("/../detokenize", cast_to=object, body={"tokens": tokenized["tokens"]})
    assert text == {"prompt": "<s>" + COUNT}


async def test_vllms_extra_fields_are_honoured(async_sdk: openai.AsyncOpenAI) -> None:
    extra = {"structured_outputs": {"choice": ["nine", "ten"]}, "top_k": 5, "min_tokens": 1}
    chosen = await async_sdk.chat.completions.create(model="demo", messages=MESSAGES, extra_body=extra)
    assert chosen.choices[0].message.content in ("nine", "ten")
    late = await async_sdk.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        extra_body={"timeout_s": 0.3, "ignore_eos": True, "structured_outputs": {"regex": "(a|b){2000}"}},
    )
    assert late.choices[0].finish_reason == "length"


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["demo"]
    assert sdk.models.retrieve("demo").owned_by == "penstock"
    with pytest.raises(openai.NotFoundError, match="no worker has ever served model 'x/y'"):
        sdk.models.retrieve("x/y")


def test_errors_are_the_sdks_exception_classes(sdk: openai.OpenAI) -> None:
    ask = sdk.chat.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model="demo", messages=MESSAGES, temperature=3000)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(model="no-such-model", messages=MESSAGES, stream=True)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        ask(model="demo", messages=[{"role": "user", "content": "x" * 9000}], stream=True)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as too_large:
        ask(model="demo", messages=[{"role": "user", "content": "x" * 300_000}])
    assert too_large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="does not embed; its tasks: generate"):
        sdk.embeddings.create(model="demo", input="x")


async def test_a_full_queue_is_a_rate_limit_error_with_retry_after(
    client: Client, async_sdk: openai.AsyncOpenAI
) -> None:
    policy = await client.queue_policy()
    await client.pause_generation()
    try:
        await client.configure_queue(QueuePolicy(tenant=TenantPolicy(max_queue_depth=1)))
        waiting = await client.submit(COUNT)
        with pytest.raises(openai.RateLimitError) as caught:
            await async_sdk.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        await client.configure_queue(policy)
        await client.resume_generation()
    assert (await waiting.result()).outputs[0].finish_reason in ("stop", "length")


async def test_a_client_that_leaves_cancels_its_request(
    client: Client, gateway: LocalGateway, async_sdk: openai.AsyncOpenAI, gate: Gate
) -> None:
    extra = {"ignore_eos": True}
    gate.hold_at(5)
    logged = len(await asyncio.to_thread(lambda: gateway.log.splitlines()))
    stream = await async_sdk.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, extra_body=extra, max_tokens=1900
    )
    response_id = (await anext(aiter(stream))).id
    await stream.close()
    whole = asyncio.ensure_future(
        async_sdk.chat.completions.create(model="demo", messages=MESSAGES, extra_body=extra, max_tokens=1900)
    )
    await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        while (await client.queue_stats()).num_running == 0:
            await asyncio.sleep(0.02)
        whole.cancel()
        while (await client.status(response_id)).state != "cancelled":
            await asyncio.sleep(0.05)
        while (await client.queue_stats()).num_running:
            await asyncio.sleep(0.05)
        # The log of the gateway is written when the response is given up.
        while len(left := await asyncio.to_thread(left_since, gateway, logged)) < 2:
            await asyncio.sleep(0.05)
    assert left == ["/v1/chat/completions"] * 2


def left_since(gateway: LocalGateway, num_lines: int) -> list[str]:
    """The paths of requests whose client left, by the gateway's log after its first ``num_lines``."""
    lines = [json.loads(line) for line in gateway.log.splitlines(keepends=True)[num_lines:] if line.endswith("\n")]
    return [line["path"] for line in lines if line.get("status") == 499]
