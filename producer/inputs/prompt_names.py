"""Name the prompt that an error is about, if there are several."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ...shared.errors import ValidationError

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
