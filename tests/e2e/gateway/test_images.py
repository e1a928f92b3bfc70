"""Images over HTTP: chat completions and responses, with the `openai` package and a small model that reads them."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from penstock.ops.lab.survey.images.models import write_vision_model
from penstock.ops.lab.survey.images.truth import picture, png
from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import LLM, BeamSearchParams, Client, SamplingParams
from penstock.shared.errors import ValidationError

from ...processes import DEADLINE_S
from ..batch_rows import CHAT, answers_of_batch

LIMIT = 6
WORDS = "What is this?"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("llava")
    write_vision_model("llava", folder)
    with LocalStack(
        folder, ["--device", "cpu", "--served-model-name", "llava", "--threads", "1", "--max-images", "3"]
    ) as client:
        yield client


@pytest.fixture(scope="module")
def url(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log_path = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with LocalGateway(stack.url, ["--status-wait", "60"], log_path) as gateway:
        yield gateway.base_url


@pytest.fixture
async def ai(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as ai:
        yield ai


def data_url(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(picture(seed))).decode()


def chat(*urls: str) -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": one, "detail": "high"}} for one in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": WORDS}]}]


async def test_a_beam_search_includes_its_images(stack: LocalStack) -> None:
    """A single beam gives the tokens of greedy sampling; in messages, and together with a prompt of tokens."""
    greedy = SamplingParams(temperature=0.0, max_tokens=LIMIT, ignore_eos=True)
    narrow = BeamSearchParams(beam_width=1, max_tokens=LIMIT, ignore_eos=True)
    expected: list[list[int]] = []
    async with Client.connect(stack.url) as client:
        for seed in (1, 2):
            parts = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": WORDS}]
            messages = [{"role": "user", "content": parts}]
            beside = {"prompt": "<image>" + WORDS, "multi_modal_data": {"image": picture(seed)}}
            for prompt in (messages, beside):
                expected.append((await client.generate(prompt, greedy)).outputs[0].token_ids)
                (beam,) = await client.beam_search([prompt], narrow)
                assert beam.sequences[0].output_token_ids == expected[-1]
        assert expected[0] != expected[2]
        card = await client.get_model_config()
        long = {"prompt": "<image>" + "a" * (card.max_model_len - 17), "multi_modal_data": {"image": picture(1)}}
        (beam,) = await client.beam_search([long], narrow)
        assert [len(one.output_token_ids) for one in beam.sequences] == [1], "the image has 16 tokens of the model's"


async def test_a_chat_includes_its_images(ai: AsyncOpenAI, stack: LocalStack) -> None:
    expected: dict[tuple[int, ...], str] = {}
    async with Client.connect(stack.url) as client:
        for seeds in ((1,), (2,), (1, 2)):
            images = [{"type": "image", "image": picture(seed)} for seed in seeds]
            messages = [{"role": "user", "content": [*images, {"type": "text", "text": WORDS}]}]
            output = await client.generate(messages, SamplingParams(temperature=0.0, max_tokens=LIMIT))
            expected[seeds] = output.outputs[0].text
    assert len(set(expected.values())) == 3
    for seeds, text in expected.items():
        messages = chat(*map(data_url, seeds))
        answer = await ai.chat.completions.create(model="llava", messages=messages, temperature=0, max_tokens=LIMIT)
        assert answer.choices[0].message.content == text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 16 * len(seeds) + len(f"user: {WORDS} assistant: ")
    parts: Any = [{"type": "input_text", "text": WORDS}]
    parts = [{"type": "input_image", "image_url": data_url(1), "detail": "auto"}, *parts]
    response = await ai.responses.create(
        model="llava", input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=LIMIT
    )
    assert response.output_text == expected[1,]
    response_of_seeds = await ai.responses.create(
        model="llava", input="And?", previous_response_id=response.id, temperature=0, max_output_tokens=LIMIT
    )
    assert response_of_seeds.usage is not None
    assert response_of_seeds.usage.input_tokens > 16 + len(WORDS)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("https://example.org/cat.png", "this gateway does not fetch images"),
        ("data:image/png;base64,*", "is not base64"),
        ("data:image/png;base64,AAAA", "no image of a kind that is read"),
        ("data:image/png;base64," + base64.b64encode(png(picture(1))[:200]).decode(), "truncated or damaged"),
    ],
)
async def test_bad_images_are_errors_in_openais_form(ai: AsyncOpenAI, bad: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        await ai.chat.completions.create(model="llava", messages=chat(data_url(1), bad), max_tokens=LIMIT)
    parts: Any = [{"type": "input_image", "image_url": bad, "detail": "auto"}]
    with pytest.raises(openai.BadRequestError, match=message):
        await ai.responses.create(model="llava", input=[{"role": "user", "content": parts}])


async def test_rows_of_batches_and_lists_of_llm_have_images(stack: LocalStack, tmp_path: Path) -> None:
    body = {"model": "llava", "temperature": 0, "max_tokens": LIMIT}
    seeds = {"one": (1,), "two": (1, 2), "again": (1,)}
    bodies = {name: body | {"messages": chat(*map(data_url, chosen))} for name, chosen in seeds.items()}
    bodies["fetched"] = body | {"messages": chat("https://example.org/cat.png")}
    bodies["damaged"] = body | {"messages": chat(data_url(1)[:400])}
    bodies["many"] = body | {"messages": chat(*[data_url(1)] * 4)}
    greedy = SamplingParams(temperature=0.0, max_tokens=LIMIT)
    prompts = [{"prompt": "<image>" * len(chosen), "multi_modal_data": {"image": list(map(picture, chosen))}}
             for chosen in seeds.values()]  # fmt: skip
    async with Client.connect(stack.url) as client:
        answers = await answers_of_batch(client, stack.url, tmp_path, CHAT, bodies)
        by_client = {name: (await client.generate(bodies[name]["messages"], greedy)).outputs[0].text for name in seeds}
        beside = [(await client.generate(prompt, greedy)).outputs[0].text for prompt in prompts]
    texts = {name: answers[name]["body"]["choices"][0]["message"]["content"] for name in seeds}
    assert texts == by_client
    assert texts["one"] == texts["again"] != texts["two"]
    reasons = {
        "fetched": "only the gateway can fetch",
        "damaged": "not base64|truncated",
        "many": "at most 3 in a request",
    }
    for name, words in reasons.items():
        assert answers[name]["status_code"] == 400
        assert re.search(words, answers[name]["body"]["error"]["message"]), answers[name]

    def by_llm() -> list[str]:
        with LLM(stack.url) as llm:
            return [output.text for output in llm.generate(prompts, greedy)]

    assert await asyncio.to_thread(by_llm) == beside


async def test_the_card_has_the_image_limit_and_the_heartbeat_the_cache(stack: LocalStack) -> None:
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": picture(9)}}
    async with Client.connect(stack.url) as client:
        assert (await client.get_model_config()).max_images == 3
        with pytest.raises(ValidationError, match="takes at most 3 in a request, got 4"):
            await client.submit({"prompt": "<image>" * 4, "multi_modal_data": {"image": [picture(1)] * 4}})
        for _ in range(2):
            await client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=2), cache_salt="of this test")
        async with asyncio.timeout(DEADLINE_S):
            while True:  # until a heartbeat has been made since
                (engine,) = await client.engines()
                images = engine.stats and engine.stats.images
                if images and images.num_cache_hits and images.num_encoded and images.memory_bytes:
                    break
                await asyncio.sleep(0.05)


async def test_a_pause_that_clears_forgets_images(stack: LocalStack) -> None:
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": picture(11)}}
    async with Client.connect(stack.url) as client:
        await client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=2))
        try:
            assert list((await client.pause_generation(mode="wait", clear_cache=True)).values()) == [True]
            assert list((await client.reset_encoder_cache()).values()) == [0]
            assert list((await client.reset_mm_cache()).values()) == [0]
        finally:
            await client.resume_generation()
