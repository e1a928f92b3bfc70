"""The demo of adapters: the same questions to the model and to each adapter, in one engine at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ...producer import Client, SamplingParams
from .styles import ADAPTERS, STYLES, style_questions
from .task import Question

# The model without an adapter.
BASE = "demo"
_PARAMS = SamplingParams(temperature=0.0, max_tokens=64)


@dataclass(frozen=True)
class StyledAnswer:
    """Answer of one adapter, or of the model alone, to one question, and the expected answer."""

    question: Question
    style: str
    text: str
    expected: str

    @property
    def correct(self) -> bool:
        return self.text.strip() == self.expected


async def ask_in_styles(url: str, questions: list[Question]) -> list[StyledAnswer]:
    """Register the adapters, and send each question to the model and to each adapter, all concurrently."""
    async with Client.connect(url) as client:
        for style in STYLES:
            await client.add_lora(style, ADAPTERS / style)

        async def ask(question: Question, style: str) -> StyledAnswer:
            adapter = None if style == BASE else style
            output = await client.generate(question.prompt, _PARAMS, lora_request=adapter)
            expected = question.answer if adapter is None else STYLES[style](question)
            return StyledAnswer(question, style, output.outputs[0].text, expected)

        return list(
            await asyncio.gather(*(ask(question, style) for question in questions for style in (BASE, *STYLES)))
        )


def show_styles(console: Console, url: str, seed: int) -> bool:
    """Show a question of each kind with all answers. Return whether at most one is wrong, as small models may be."""
    questions = style_questions(1, seed)
    answers = asyncio.run(ask_in_styles(url, questions))
    console.print("\nthe same model with LoRA adapters, chosen by name in each request, in one batch")
    for question in questions:
        console.print(Text(question.prompt, style="dim"))
        for answer in answers:
            if answer.question is question:
                mark = Text("✓ ", style="green") if answer.correct else Text("✗ ", style="red")
                console.print(Text("  ") + mark + Text(f"{answer.style:<10}", style="dim") + Text(answer.text.strip()))
    return sum(not answer.correct for answer in answers) <= 1
