"""Compiled kernel for the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..native import library
from . import reference
from .draws import DTYPES, Draws

# Number of most probable tokens that the kernel considers; the reference samples rows with a larger top_k.
_WIDTH = 64


def is_row_independent(logits: Tensor, top_k: Tensor) -> bool:
    """Return whether ``argmax`` and ``sample`` compute each row independently of the others."""
    is_wide = (top_k > _WIDTH) & (top_k < logits.shape[1])
    return library("sample", logits.dtype) is not None and logits.stride(1) == 1 and not bool(is_wide.any())


def argmax(logits: Tensor) -> Tensor:
    """See ``sampling.argmax``."""
    function = library("sample", logits.dtype)
    if function is None or logits.stride(1) != 1:
        return reference.argmax(logits)
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    no_parameters = (None,) * len(DTYPES)
    function(logits.data_ptr(), logits.stride(0), *no_parameters, tokens.data_ptr(), num_rows, vocab_size)
    return tokens


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """See ``sampling.sample``."""
    function = library("sample", logits.dtype)
    num_rows, vocab_size = logits.shape
    if function is None or logits.stride(1) != 1:
        return reference.sample(logits, draws)
    is_wide = (draws.top_k > _WIDTH) & (draws.top_k < vocab_size)
    has_wide = bool(is_wide.any())
    temperature = draws.temperature.masked_fill(is_wide, 0.0) if has_wide else draws.temperature
    tokens = torch.empty(num_rows, dtype=torch.int64)
    parameters = replace(draws, temperature=temperature).columns()
    pointers = [column.data_ptr() for column in (*parameters, tokens)]
    function(logits.data_ptr(), logits.stride(0), *pointers, num_rows, vocab_size)
    if has_wide:
        tokens[is_wide] = reference.sample(logits[is_wide], draws.select(is_wide))
    return tokens
