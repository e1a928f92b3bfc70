"""The demo model's three tasks: the questions, their exact answers and the held-out split.

A demo should show that a model ran, not that text appeared: every answer here has one correct
spelling, so the caller of a streamed generation can check it to the last character.

    add     "four hundred seven plus thirteen is"  ->  "four hundred twenty."
    spell   "spell 407:"                           ->  "four hundred seven."
    count   "count from four to nine:"             ->  "four five six seven eight nine."

The split is a stable hash of the operands, so training, evaluation and demo agree on it without a
shared file. Standard library only: the demo command must not import torch to ask a question.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

Task = Literal["add", "spell", "count"]
Operands = tuple[int, ...]

TASKS: tuple[Task, ...] = ("add", "spell", "count")
MAX_WORD_OPERAND = 999
MAX_SPELLED = 9999
MAX_COUNTED = 12
HELD_OUT_ONE_IN = 20
MAGNITUDES = (10, 100, 1000)
MAGNITUDE_WEIGHTS = (1, 3, 6)

_ONES = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ADD = re.compile(r"([a-z ]+) plus ([a-z ]+) is")
_SPELL = re.compile(r"spell (0|[1-9][0-9]{0,3}):")
_COUNT = re.compile(r"count from ([a-z ]+) to ([a-z ]+):")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its only correct answer, without the leading space, with the final "."."""

    task: Task
    prompt: str
    answer: str


def number_words(number: int) -> str:
    """Spell ``number``, 0 to 9999: lower case, no "and", no hyphens."""
    if not 0 <= number <= MAX_SPELLED:
        raise ValueError(f"number must be in 0..{MAX_SPELLED}, got {number}")
    for unit, name in ((1000, "thousand"), (100, "hundred")):
        if number >= unit:
            head = f"{number_words(number // unit)} {name}"
            return f"{head} {number_words(number % unit)}" if number % unit else head
    if number < len(_ONES):
        return _ONES[number]
    return f"{_TENS[number // 10]} {_ONES[number % 10]}" if number % 10 else _TENS[number // 10]


@cache
def _operand_of_words() -> dict[str, int]:
    return {number_words(number): number for number in range(MAX_WORD_OPERAND + 1)}


def parse_words(words: str) -> int:
    """Return the number that ``words`` spell, 0 to 999, in exactly the spelling of ``number_words``."""
    try:
        return _operand_of_words()[words]
    except KeyError:
        raise ValueError(f"not a number in words, 0..{MAX_WORD_OPERAND}: {words!r}") from None


def parse(prompt: str) -> tuple[Task, Operands]:
    """Recognise a prompt of this module, so that its answer follows from its text alone."""
    if match := _ADD.fullmatch(prompt):
        return "add", (parse_words(match[1]), parse_words(match[2]))
    if match := _SPELL.fullmatch(prompt):
        return "spell", (int(match[1]),)
    if match := _COUNT.fullmatch(prompt):
        first, last = parse_words(match[1]), parse_words(match[2])
        if 1 < last - first + 1 <= MAX_COUNTED:
            return "count", (first, last)
    raise ValueError(f"not a question of this task: {prompt!r}")


def answer(prompt: str) -> str:
    """Return the correct answer to ``prompt``, the stripped text of a correct greedy generation.

    Raises:
        ValueError: ``prompt`` is not a question of the three tasks, in their exact form and range.
    """
    task, operands = parse(prompt)
    match task:
        case "add":
            return f"{number_words(sum(operands))}."
        case "spell":
            return f"{number_words(operands[0])}."
        case "count":
            return f"{' '.join(number_words(n) for n in range(operands[0], operands[1] + 1))}."


def is_held_out(task: Task, operands: Operands) -> bool:
    """Return whether a question is excluded from training; 1 in 20 are.

    A sum is judged by its sorted operands: otherwise "a plus b" could be trained and "b plus a" tested.
    """
    normalised = sorted(operands) if task == "add" else operands
    key = f"{task} {' '.join(map(str, normalised))}"
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def make_question(task: Task, operands: Operands) -> Question:
    """Word the question; the answer is read back from the prompt, so each checks the other."""
    match task:
        case "add":
            prompt = f"{number_words(operands[0])} plus {number_words(operands[1])} is"
        case "spell":
            prompt = f"spell {operands[0]}:"
        case "count":
            prompt = f"count from {number_words(operands[0])} to {number_words(operands[1])}:"
    return Question(task, prompt, answer(prompt))


def _draw_operands(task: Task, rng: Random) -> Operands:
    """Draw operands. The magnitude is drawn first, else only one number in a hundred would have one digit."""

    def magnitude() -> int:
        return rng.choices(MAGNITUDES, MAGNITUDE_WEIGHTS)[0]

    match task:
        case "add":
            return rng.randrange(magnitude()), rng.randrange(magnitude())
        case "spell":
            return (rng.randrange(10 * magnitude()),)
        case "count":
            length = rng.randint(2, MAX_COUNTED)
            first = rng.randrange(min(magnitude(), MAX_WORD_OPERAND + 2 - length))
            return first, first + length - 1


def draw_question(task: Task, rng: Random, *, held_out: bool) -> Question:
    """Return a random question from the held-out or the training split."""
    while is_held_out(task, operands := _draw_operands(task, rng)) != held_out:
        pass
    return make_question(task, operands)


def _all_operands(task: Task) -> Iterator[Operands]:
    numbers = range(MAX_WORD_OPERAND + 1)
    match task:
        case "add":
            return ((a, b) for a in numbers for b in numbers)
        case "spell":
            return ((n,) for n in range(MAX_SPELLED + 1))
        case "count":
            return ((a, b) for a in numbers for b in numbers[a + 1 : a + MAX_COUNTED])


def held_out_questions(task: Task) -> list[Question]:
    """Return every held-out question of ``task``, uniform over its operands. Takes a second or two for "add"."""
    return [make_question(task, operands) for operands in _all_operands(task) if is_held_out(task, operands)]


def demo_questions(n: int, seed: int) -> list[Question]:
    """Return ``n`` distinct held-out questions in random order, the three tasks mixed evenly.

    There are about 500 held-out questions of "spell" and of "count"; beyond that, sums fill up.
    """
    rng = Random(seed)
    questions: dict[str, Question] = {}
    while len(questions) < n:
        question = draw_question(rng.choice(TASKS), rng, held_out=True)
        questions.setdefault(question.prompt, question)
    return list(questions.values())
