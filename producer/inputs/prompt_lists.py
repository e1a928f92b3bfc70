"""Several prompts in one call: conversations, pairs of texts, and the name of the prompt that an error is about."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...shared.errors import ValidationError
from ...shared.values.shown import shown
from .prompt import Prompt

# The word "prompt" at the start of a message; a longer name such as `prompt_logprobs` is a parameter.
_ABOUT_PROMPT = re.compile(r"^prompt\b")


def numbered(name: str, values: Sequence[object]) -> list[str]:
    """Return the names of several values; a single value has no number."""
    return [f"{name}[{index}]" for index in range(len(values))] if len(values) != 1 else [name]


@contextmanager
def naming(name: str) -> Generator[None]:
    """Replace "prompt" in front of a ``ValidationError`` by the prompt's own name."""
    try:
        yield
    except ValidationError as error:
        message = _ABOUT_PROMPT.sub(name, str(error))
        if message == str(error):
            raise
        raise type(error)(message) from error


def pairs_of(texts: str | Sequence[str], others: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs. Raises ``ValidationError`` if the numbers do not match, or a value is not text."""
    each, against = _texts_of("texts", texts), _texts_of("others", others)
    if len(each) == 1:
        each *= len(against)
    if len(each) != len(against) or not each:
        raise ValidationError(f"texts must be one, or as many as the others ({len(against)}), got {len(each)}")
    return list(zip(each, against, strict=True))


def _texts_of(name: str, value: object) -> list[str]:
    if isinstance(value, str):
        text_by_field: dict[str, object] = {name: value}
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        text_by_field = {f"{name}[{index}]": text for index, text in enumerate(value)}
    else:
        raise ValidationError(f"{name} must be a text or a list of texts, got {shown(value)}")
    for field, text in text_by_field.items():
        if not isinstance(text, str) or not text:
            raise ValidationError(f"{field} must be a text that is not empty, got {shown(text)}")
    return list(text_by_field.values())  # type: ignore[arg-type]  # checked above


def names_of_pairs(texts: str | Sequence[str], others: str | Sequence[str], num_pairs: int) -> list[tuple[str, str]]:
    """Return the names of the two texts of each pair: the argument, and the index in it if it is a list."""
    each, against = (
        [name] if isinstance(value, str) else [f"{name}[{index}]" for index in range(len(value))]
        for name, value in (("texts", texts), ("others", others))
    )
    return list(zip(each * num_pairs if len(each) == 1 else each, against, strict=True))


def as_conversations(messages: Any) -> list[Prompt]:
    """Return one conversation or many as a list. Raises ``ValidationError`` if it is neither."""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        if messages and all(isinstance(message, Mapping) for message in messages):
            return [messages]
        for position, conversation in enumerate(messages):
            is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
            if not (is_list and conversation and all(isinstance(message, Mapping) for message in conversation)):
                raise ValidationError(
                    f"messages[{position}] must be a conversation, a list of messages, got {shown(conversation)}"
                )
        return list(messages)
    raise ValidationError(f"messages must be a conversation or a list of them, got {shown(messages)}")
