"""The three adapters of the demo model, and the same questions to the model and to each of them.

Each question has one correct answer per adapter, as for the model itself. One engine answers all at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.text import Text

from ...producer import Client, SamplingParams
from .task import TASKS, Question, Task, draw_question, number_words, parse

ADAPTERS = Path(__file__).parent / "adapters"
BELOW = 100
# The model without an adapter.
BASE = "demo"
_PARAMS = SamplingParams(temperature=0.0, max_tokens=64)


def _digits(question: Question) -> str:
    return question.answer if question.task == "count" else f"{sum(parse(question.prompt)[1])}."


def _downwards(question: Question) -> str:
    if question.task != "count":
        return question.answer
    first, last = parse(question.prompt)[1]
    return f"{' '.join(number_words(number) for number in range(last, first - 1, -1))}."


def _loud(question: Question) -> str:
    return question.answer.replace(".", "!")


STYLES: dict[str, Callable[[Question], str]] = {"digits": _digits, "downwards": _downwards, "loud": _loud}


def draw_small(task: Task, rng: Random, *, held_out: bool) -> Question:
    """Return a random question about numbers below a hundred, from the held-out or the training split."""
    while max(parse((question := draw_question(task, rng, held_out=held_out)).prompt)[1]) >= BELOW:
        pass
    return question


def style_questions(num_of_each: int, seed: int) -> list[Question]:
    """Return ``num_of_each`` different held-out questions of each task. Only five exist for "spell"."""
    rng, questions = Random(seed), dict[str, Question]()
    for number, task in enumerate(TASKS, start=1):
        while len(questions) < number * num_of_each:
            question = draw_small(task, rng, held_out=True)
            questions[question.prompt] = question
    return list(questions.values())


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
