"""Loads the configured backend of structured output when the first request needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ....shared.errors import PenstockError, UnsupportedParameterError, ValidationError
from ...core import exit_report
from .grammar import Backend, CompiledGrammar
from .spec import GrammarSpec
from .vocabulary import Vocabulary


class LazyBackend:
    """A backend that the first calling thread loads once."""

    def __init__(self, load: Callable[[], Backend]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._backend: Backend | None = None

    def get(self) -> Backend:
        """Return the backend; load it, or wait for the thread that loads it. A failed load is repeated at each call."""
        with self._lock:
            if self._backend is None:
                self._backend = self._load()
            return self._backend


class AutoBackend:
    """Compiles by one library, or by another one what the first refuses; see ``grammar.Backend``.

    A grammar goes to the same library in every engine, so a resumed request does too.

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


def load_backend(name: str, tokenizer_folder: Path, vocab_size: int, eos_token_ids: list[int]) -> Backend:
    """Import the library ``name`` and create its backend for the model's vocabulary; "auto" uses both libraries.

    Raises:
        UnsupportedParameterError: the library is not installed, or cannot serve this model.
    """
    if name == "auto":
        first = load_backend("xgrammar", tokenizer_folder, vocab_size, eos_token_ids)
        return AutoBackend(first, lambda: load_backend("llguidance", tokenizer_folder, vocab_size, eos_token_ids))
    try:
        if name == "llguidance":
            from .llguidance_backend import LlguidanceBackend as make_backend
        else:
            from .xgrammar_backend import XgrammarBackend as make_backend
    except ImportError as error:
        raise UnsupportedParameterError(
            f"structured_outputs needs the package {name}, which this worker cannot import: {error}"
        ) from error
    # Restore our fault handlers, because xgrammar replaces them when it is imported.
    exit_report.handle_faults()
    return make_backend(Vocabulary.load(tokenizer_folder, vocab_size, eos_token_ids))
