"""Loads the configured backend when the first request needs it."""

from __future__ import annotations

from pathlib import Path

from ....shared.errors import UnsupportedParameterError
from ...core import exit_report
from .auto_backend import AutoBackend
from .grammar import Backend
from .vocabulary import Vocabulary


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
