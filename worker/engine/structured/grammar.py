"""The interface to a library for constrained output. ``Grammar`` has the method names of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .spec import GrammarSpec

# [R, ceil(V / 32)]; bit i % 32 of word i // 32 is set if token i is allowed.
Bitmask = NDArray[np.int32]


class Grammar(Protocol):
    """The state of one output in its grammar. Not thread-safe."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance by ``token_ids``; return False if one does not fit, which leaves the state undefined."""
        ...

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return the longest prefix of ``token_ids`` that fits, without advancing."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""
        ...

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> None:
        """Write the allowed next tokens into ``row``. Do not call it after the end."""
        ...

    def forced_tokens(self, room: int) -> list[int]:
        """Return at most ``room`` tokens of the text that must follow, the longest first; none if there is a choice."""
        ...

    def is_terminated(self) -> bool:
        """Return whether an ending token has been accepted. No token may follow it."""
        ...

    def reset(self) -> None:
        """Go back to the beginning."""
        ...


class CompiledGrammar(Protocol):
    """A grammar that any number of outputs can use at the same time."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory in use."""
        ...

    def start(self, ending_token_ids: frozenset[int]) -> Grammar:
        """Begin an output. ``ending_token_ids`` are allowed only where the grammar may end, and end it."""
        ...


class Backend(Protocol):
    """A library with one model's vocabulary. ``compile`` is called by several threads."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``; may take long.

        Raises:
            ValidationError: the library refuses it or would ignore a part of it; the message names the part.
        """
        ...


def num_words(vocab_size: int) -> int:
    """Return the number of words in a row of a ``Bitmask``."""
    return -(-vocab_size // 32)
