"""The three adapters of the demo model. Each question has one correct answer per adapter, as for the model itself.

    digits     "four plus thirteen is"      ->  "17."; counts in words, as the model
    downwards  "count from four to six:"    ->  "six five four."; sums and spells as the model
    loud       "spell 47:"                  ->  "forty seven!"

They are trained and tested on numbers below a hundred. Training takes a minute or two each. Standard library only, as
``task``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from .task import TASKS, Question, Task, draw_question, number_words, parse

ADAPTERS = Path(__file__).parent / "adapters"
BELOW = 100


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
