"""The rows of a step that are not looked up by their token: prompts that are given as embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....shared.prompt_embeds import PromptEmbeds
from ..scheduling.request import Request
from ..step_input import StepInput


@dataclass
class GivenEmbeds:
    """The ``E`` tokens of a step whose embeddings are given.

    Args:
        places: ``[E]``, among the packed tokens.
        rows: ``[E, hidden size]``, on the CPU, of the requests' dtypes made float32.
    """

    places: NDArray[np.int64]
    rows: Tensor


class PromptEmbedsTable:
    """Those rows of the batch whose requests have prompt embeddings; empty, and free of cost, while none has."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def set_row(self, row: int, request: Request) -> None:
        """Take up ``request`` in ``row``, if its prompt is embeddings."""
        if request.prompt_embeds is not None:
            self._rows[row] = _tensor(request.prompt_embeds)

    def forget_row(self, row: int) -> None:
        """Drop ``row``, if it is here."""
        self._rows.pop(row, None)

    def take(self, step: StepInput) -> GivenEmbeds | None:
        """What ``step`` computes of the given embeddings; None if that is nothing."""
        if not self._rows:
            return None
        places: list[NDArray[np.int64]] = []
        rows: list[Tensor] = []
        ends = np.cumsum(step.query_lens).tolist()
        for row, end, num_tokens, num_new_tokens in zip(
            step.rows.tolist(), ends, step.seq_lens.tolist(), step.query_lens.tolist(), strict=True
        ):
            embeds = self._rows.get(row)
            start = num_tokens - num_new_tokens
            if embeds is None or start >= len(embeds):
                continue
            stop = min(num_tokens, len(embeds))
            places.append(np.arange(start, stop) + end - num_tokens)
            rows.append(embeds[start:stop].float())
        return GivenEmbeds(np.concatenate(places), torch.cat(rows)) if places else None


def _tensor(embeds: PromptEmbeds) -> Tensor:
    data = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
    return data.view(embeds.shape)
