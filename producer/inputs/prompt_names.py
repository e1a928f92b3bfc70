"""Which of several prompts an error is about: said in front of it, as a field is."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ...shared.errors import ValidationError

# The name of the prompt, at the beginning of what is wrong with it; `prompt_name` is a parameter.
_ABOUT_PROMPT = re.compile(r"^prompt\b")


def numbered(name: str, given: Sequence[object]) -> list[str]:
    """What one of several is called, or the only one."""
    return [f"{name}[{index}]" for index in range(len(given))] if len(given) != 1 else [name]


@contextmanager
def naming(name: str) -> Generator[None]:
    """What is wrong with a prompt is raised with its own name."""
    try:
        yield
    except ValidationError as error:
        said = _ABOUT_PROMPT.sub(name, str(error))
        if said == str(error):
            raise
        raise type(error)(said) from error
