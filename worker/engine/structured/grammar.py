"""What the engine needs of a library for constrained output; the names of ``Grammar``'s methods are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .spec import GrammarSpec

# [R, ceil(V / 32)]; bit i % 32 of word i // 32 is set if token i is allowed.
Bitmask = NDArray[np.int32]


class Grammar(Protocol):
    """How far one output has come in its grammar. Not thread-safe."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance by ``token_ids``; False if one does not fit, and then the place is undefined."""
        ...

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The longest beginning of ``token_ids`` that fits, without advancing."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` accepted tokens."""
        ...

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> None:
        """Write into ``row`` which tokens may come next; not to be called after the end."""
        ...

    def forced_tokens(self, room: int) -> list[int]:
        """At most ``room`` tokens that spell the text that must come next, long ones first; none where there is a
        choice."""
        ...

    def is_terminated(self) -> bool:
        """Whether an ending token has been accepted, after which nothing may come."""
        ...

    def reset(self) -> None:
        """Go back to the beginning."""
        ...


class CompiledGrammar(Protocol):
    """A grammar that any number of outputs may follow at the same time."""

    @property
    def num_bytes(self) -> int:
        """About what it takes of memory."""
        ...

    def start(self, ending_token_ids: frozenset[int]) -> Grammar:
        """Begin an output. One of ``ending_token_ids`` ends it where the grammar may end, and comes nowhere else."""
        ...


class Backend(Protocol):
    """A library with one model's vocabulary. ``compile`` is called by several threads."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``; may take long.

        Raises:
            ValidationError: the library refuses it, or would ignore a part of it; says what.
        """
        ...


def num_words(vocab_size: int) -> int:
    """Words in a row of a ``Bitmask``."""
    return -(-vocab_size // 32)
