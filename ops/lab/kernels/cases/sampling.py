"""The vocabulary of Qwen3: rows whose draw ends within the first tokens, and rows that are searched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .....kernels.sampling import DTYPES, Draws, argmax, reference, sample
from . import Case, Setting

# Filters and the standard deviation of the logits, by name.
_FILTERS = {
    "free": ({}, 2.0),
    "top_k=20 top_p=0.95": ({"top_k": 20, "top_p": 0.95}, 2.0),
    "top_p=0.95, steep": ({"top_p": 0.95}, 8.0),
    "top_p=0.95, flat": ({"top_p": 0.95}, 1.0),
}


def cases(setting: Setting) -> Iterator[Case]:
    """Yield cases from one request to a full batch. Logits to sample from are float32, in which few are equal."""
    for num_rows, vocab_size in setting.choose(
        on_gpu=[(1, 151_936), (256, 151_936), (64, 151_936)], on_cpu=[(16, 49_152)]
    ):
        logits = setting.random(num_rows, vocab_size)
        yield Case(
            shape=f"argmax R={num_rows} V={vocab_size}",
            dtype=logits.dtype,
            inputs=(logits,),
            run=argmax,
            truth=reference.argmax,
            num_bytes=logits.nbytes,
        )
        for name, (params, scale) in _FILTERS.items():
            wide = setting.random(num_rows, vocab_size, dtype=torch.float32) * scale
            draws = _draws(num_rows, **params)
            yield Case(
                shape=f"{name} R={num_rows} V={vocab_size}",
                dtype=wide.dtype,
                inputs=(wide,),
                run=_bind(sample, draws),
                truth=_bind(reference.sample, draws),
                rivals={"torch.topk": _bind(reference.sample, draws)},
                num_bytes=2 * wide.nbytes,
            )


def _draws(num_rows: int, top_k: int = 0, top_p: float = 1.0) -> Draws:
    values = {"temperature": 1.0, "top_k": top_k, "top_p": top_p}
    columns = {name: torch.full((num_rows,), values.get(name, 0), dtype=dtype) for name, dtype in DTYPES.items()}
    columns["uniforms"] = (torch.arange(num_rows, dtype=torch.float64) + 0.37) / num_rows
    return Draws(**columns)


def _bind(function: Callable[[Tensor, Draws], Tensor], draws: Draws) -> Callable[[Tensor], Tensor]:
    return lambda logits: function(logits, draws)
