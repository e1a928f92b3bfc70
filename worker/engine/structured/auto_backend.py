"""Structured output by xgrammar, or by llguidance for grammars that xgrammar refuses."""

from __future__ import annotations

from collections.abc import Callable

from ....shared.errors import PenstockError, ValidationError
from .grammar import Backend, CompiledGrammar
from .lazy_backend import LazyBackend
from .spec import GrammarSpec


class AutoBackend:
    """See ``grammar.Backend``. A grammar goes to the same library in every engine, so a resumed request does too.

    Args:
        first: compiles every grammar that it supports.
        load_second: load the backend for grammars that the first refuses.
    """

    def __init__(self, first: Backend, load_second: Callable[[], Backend]) -> None:
        self._first = first
        self._second = LazyBackend(load_second)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        try:
            return self._first.compile(spec)
        except PenstockError as refused:
            try:
                return self._second.get().compile(spec)
            except PenstockError as again:
                raise ValidationError(f"{refused}; by the other library: {again}") from again
