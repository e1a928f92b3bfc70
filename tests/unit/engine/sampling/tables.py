"""Sampling tables of requests, and checks that hold for every row of one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.kernels.sampling import reference
from penstock.worker.engine.sampling.sampler import SamplingTable, sample
from penstock.worker.engine.scheduling.request import Request


def table_of(*requests: Request) -> SamplingTable:
    """A table whose rows are ``requests``, in order."""
    table = SamplingTable(len(requests))
    for row, request in enumerate(requests):
        table.set_row(row, request)
    return table


def assert_rows_are_their_own(
    requests: Sequence[Request], logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request draws the same token alone, with all others, in another order, and where logits are cut in pieces.

    Args:
        logits: shape (number of requests, vocabulary).
    """
    num_rows, vocab_size = logits.shape
    table = table_of(*requests)
    num_tokens = np.array([request.num_tokens for request in requests])

    def draw(index: np.ndarray) -> torch.Tensor:
        return sample(logits[torch.from_numpy(index)].clone(), table.select(index, num_tokens[index]))

    together = draw(np.arange(num_rows))
    order = np.random.default_rng(0).permutation(num_rows)
    assert torch.equal(torch.cat([draw(np.array([i])) for i in range(num_rows)]), together)
    assert torch.equal(draw(order), together[torch.from_numpy(order)])
    monkeypatch.setattr(reference, "_CPU_PIECE_ELEMENTS", 10 * vocab_size)
    assert torch.equal(draw(np.arange(num_rows)), together)
