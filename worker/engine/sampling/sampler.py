"""Chooses the next tokens from logits.

Changes for single requests are applied first, in vLLM's order: rules about tokens (``token_rules.py``), the operator's
processors, penalties, a forced end of thinking (all three in ``row_changes.py``), grammars
(``structured/table.py``). Temperature and filters follow, also in vLLM's order. A row draws from the remaining tokens
with one uniform number of its seed and position (``kernels/sampling``).

The random numbers of requests depend on seed and position alone. So a request draws the same numbers in any batch, and
an engine that resumes it continues the same stream.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels import sampling
from .sampling_table import SamplingRows

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each pair of a seed and an output position, all ``[R]``."""
    streams = _mix(seeds + _GOLDEN)
    bits = _mix(streams + positions.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele et al. 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def samples_rows_independently(logits: Tensor, rows: SamplingRows) -> bool:
    """Return whether ``sample`` processes each row independently, so that its bits depend on no other row."""
    is_plain = not rows.changes and rows.num_logprobs is None
    return is_plain and sampling.is_row_independent(logits, torch.from_numpy(rows.parameters["top_k"]))


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return one token id per row, ``[R]`` int64. ``logits``, ``[R, V]`` of any float dtype, may be overwritten."""
    for change in rows.changes:
        logits = change.apply(logits)
    if not rows.parameters["temperature"].any():
        return sampling.argmax(logits)
    columns = rows.parameters | {"uniforms": uniforms(rows.seeds, rows.positions)}
    draws = sampling.Draws(**{name: torch.from_numpy(column) for name, column in columns.items()})
    return sampling.sample(logits, draws)
