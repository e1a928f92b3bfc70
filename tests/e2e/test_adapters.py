"""The adapters of the demo through the whole stack: by name, together with the base, in batches and in lists of
``LLM``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.demo.styles import ADAPTERS, STYLES, style_questions
from penstock.ops.local.stack import LocalStack
from penstock.producer import LLM, BeamSearchParams, Client, SamplingParams
from penstock.shared.errors import ValidationError

from .batch_rows import COMPLETIONS, answers_of_batch

LIMIT = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=LIMIT)
QUESTIONS = style_questions(2, seed=3)


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    options = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--enable-lora", "--max-loras", "2"]
    with LocalStack(MODEL, options) as stack:
        yield stack


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[Client]:
    async with Client.connect(stack.url) as client:
        for style in STYLES:
            await client.add_lora(style, ADAPTERS / style)
        yield client


async def test_each_answers_in_its_style_in_one_batch(client: Client) -> None:
    cases = [(style, question) for style in ("demo", *STYLES) for question in QUESTIONS]
    outputs = await asyncio.gather(
        *(client.generate(question.prompt, GREEDY, model=style) for style, question in cases)
    )
    expected = [question.answer if style == "demo" else STYLES[style](question) for style, question in cases]
    assert [output.outputs[0].text.strip() for output in outputs] == expected


async def test_a_row_of_a_batch_has_the_adapter_that_it_names(
    client: Client, stack: LocalStack, tmp_path: Path
) -> None:
    for style in ("digits", "demo"):
        bodies = {
            question.prompt: {"model": style, "prompt": question.prompt, "temperature": 0, "max_tokens": LIMIT}
            for question in QUESTIONS
        }
        answers = await answers_of_batch(client, stack.url, tmp_path / style, COMPLETIONS, bodies)
        for question in QUESTIONS:
            body = answers[question.prompt]["body"]
            assert body["model"] == style
            assert body["choices"][0]["text"].strip() == (
                question.answer if style == "demo" else STYLES[style](question)
            )


async def test_a_search_ends_with_the_adapter_that_it_began_with(
    client: Client, stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is pointed to another one between two steps."""
    (question,) = QUESTIONS[:1]
    params = BeamSearchParams(beam_width=2, max_tokens=LIMIT)
    await client.add_lora("moving", ADAPTERS / "digits")
    (expected,) = await client.beam_search(question.prompt, params, model="digits")
    generate, num_calls = client.generate, itertools.count()

    async def generate_and_move(*args: Any, **options: Any) -> Any:
        if next(num_calls) == 3:
            await client.add_lora("moving", ADAPTERS / "loud")
        return await generate(*args, **options)

    monkeypatch.setattr(client, "generate", generate_and_move)
    (beam,) = await client.beam_search(question.prompt, params, model="moving")
    assert next(num_calls) > 4
    assert [one.tokens for one in beam.sequences] == [one.tokens for one in expected.sequences]
    assert beam.sequences[0].text.strip() == STYLES["digits"](question)


def test_a_list_of_llm_has_one_for_all_or_one_each(client: Client, stack: LocalStack) -> None:
    prompts = [question.prompt for question in QUESTIONS[:3]]
    styles = ["loud", None, "digits"]
    with LLM(stack.url) as llm:
        outputs = llm.generate(prompts, GREEDY, lora_request=styles)
        expected = [
            q.answer if style is None else STYLES[style](q) for style, q in zip(styles, QUESTIONS, strict=False)
        ]
        assert [output.text.strip() for output in outputs] == expected
        outputs = llm.generate(prompts, GREEDY, lora_request="digits")
        assert [output.text.strip() for output in outputs] == [STYLES["digits"](q) for q in QUESTIONS[:3]]
        with pytest.raises(ValidationError, match=r"lora_request must be one or as many as the prompts \(3\), got 2"):
            llm.generate(prompts, GREEDY, lora_request=["digits", "digits"])
