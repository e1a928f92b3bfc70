"""The demo's adapters beside its model: the same questions to each, by name, in one engine at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ...producer import Client, SamplingParams
from .styles import ADAPTERS, STYLES, style_questions
from .task import Question

# What none of them changes: the model alone.
BASE = "demo"
_PARAMS = SamplingParams(temperature=0.0, max_tokens=64)


@dataclass(frozen=True)
class StyledAnswer:
    """What one adapter, or the model alone, said to one question, and what it was to say."""

    question: Question
    style: str
    text: str
    expected: str

    @property
    def correct(self) -> bool:
        return self.text.strip() == self.expected


async def ask_in_styles(url: str, questions: list[Question]) -> list[StyledAnswer]:
    """Give the adapters their names, and ask each question of the model and of each of them, all at once."""
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
    """Show a question of each kind with all answers; whether at most one is wrong, as small models may have it."""
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
