"""Requests with a thousand distinct tokens each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .....kernels.penalties import penalize, reference
from . import Case, Setting


def cases(setting: Setting) -> Iterator[Case]:
    for num_rows in setting.choose(on_gpu=[1, 64], on_cpu=[8]):
        vocab_size, num_each = 151_936, 1000
        logits = setting.random(num_rows, vocab_size, dtype=torch.float32)
        rows = torch.arange(num_rows, device=setting.device).repeat_interleave(num_each)
        token_ids = setting.distinct(vocab_size, num_each, dtype=torch.int64).repeat(num_rows)
        repetition = torch.full((len(rows),), 1.1, device=setting.device)
        deduction = torch.full((len(rows),), 0.5, device=setting.device)

        def run(logits: Tensor, *penalties: Tensor, function=penalize) -> Tensor:
            function(logits, *penalties)
            return logits

        def truth(logits: Tensor, *penalties: Tensor) -> Tensor:
            return run(logits, *penalties, function=reference.penalize)

        yield Case(
            shape=f"R={num_rows} V={vocab_size} E={len(rows)}",
            dtype=logits.dtype,
            inputs=(logits, rows, token_ids, repetition, deduction),
            run=run,
            truth=truth,
            rivals={"torch": truth},
            num_bytes=32 * len(rows),
        )
