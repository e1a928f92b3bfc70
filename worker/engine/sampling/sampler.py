"""Chooses the next tokens from logits.

Changes for single requests are applied first, in vLLM's order: rules about tokens (``token_rules.py``), the operator's
processors (``processed_rows.py``), penalties (``penalties.py``), a forced end of thinking (``thinking.py``), grammars
(``structured/table.py``). Filters follow, also in vLLM's order: temperature, ``min_p``, ``top_k``, ``top_p``. A row
draws from the remaining tokens with one uniform number of its seed and position (``kernels/sampling``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels import sampling
from .randomness import uniforms
from .sampling_table import SamplingRows


def samples_rows_independently(logits: Tensor, rows: SamplingRows) -> bool:
    """Return whether ``sample`` processes each row independently, so that its bits depend on no other row."""
    is_plain = not rows.changes and rows.num_logprobs is None
    return is_plain and sampling.is_row_independent(logits, torch.from_numpy(rows.top_k))


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return one token id per row, ``[R]`` int64. ``logits``, ``[R, V]`` of any float dtype, may be overwritten."""
    for change in rows.changes:
        logits = change.apply(logits)
    if not rows.temperature.any():
        return sampling.argmax(logits)
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, uniforms(rows.seeds, rows.positions))
    return sampling.sample(logits, sampling.Draws(*map(torch.from_numpy, columns)))
