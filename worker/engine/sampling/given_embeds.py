"""Input embeddings that are not looked up by token id: prompt embeddings and image features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....shared.params.prompt_embeds import PromptEmbeds
from ..core.step_input import StepInput
from ..scheduling.request import Request


@dataclass
class StepEmbeds:
    """The ``E`` tokens of a step with embeddings from the request.

    Args:
        places: ``[E]``, indices among the packed tokens.
        rows: ``[E, hidden size]``, on the CPU, converted from the requests' dtypes to float32.
    """

    places: NDArray[np.int64]
    rows: Tensor


@dataclass
class _RowEmbeds:
    """Embeddings of one request: ``places [E]`` in its prompt, ascending, and ``rows [E, hidden size]``."""

    places: NDArray[np.int64]
    rows: Tensor


class EmbedsTable:
    """Embeddings by row of the batch. Empty, and without cost, while no request has prompt embeddings or images."""

    def __init__(self) -> None:
        self._rows: dict[int, _RowEmbeds] = {}

    def set_row(self, row: int, request: Request) -> None:
        """Store the embeddings of ``request`` in ``row``, if it has prompt embeddings or images."""
        if request.prompt_embeds is not None:
            embeds = _tensor(request.prompt_embeds)
            self._rows[row] = _RowEmbeds(np.arange(len(embeds)), embeds)
        elif request.images:
            places = np.concatenate([np.array(image.places, np.int64) for image in request.images])
            self._rows[row] = _RowEmbeds(places, torch.cat([image.features for image in request.images]))

    def forget_row(self, row: int) -> None:
        """Drop ``row``, if it is stored."""
        self._rows.pop(row, None)

    def select(self, step: StepInput) -> StepEmbeds | None:
        """Return the embeddings of the tokens of ``step``; None if it has none."""
        if not self._rows:
            return None
        places: list[NDArray[np.int64]] = []
        rows: list[Tensor] = []
        ends = np.cumsum(step.query_lens).tolist()
        for row, end, num_tokens, num_new_tokens in zip(
            step.rows.tolist(), ends, step.seq_lens.tolist(), step.query_lens.tolist(), strict=True
        ):
            embeds = self._rows.get(row)
            if embeds is None:
                continue
            start, stop = np.searchsorted(embeds.places, (num_tokens - num_new_tokens, num_tokens)).tolist()
            if start < stop:
                places.append(embeds.places[start:stop] + end - num_tokens)
                rows.append(embeds.rows[start:stop].float())
        return StepEmbeds(np.concatenate(places), torch.cat(rows)) if places else None


def _tensor(embeds: PromptEmbeds) -> Tensor:
    data = torch.frombuffer(bytearray(embeds.data), dtype=getattr(torch, embeds.dtype))
    return data.view(embeds.shape)
