"""Rows of the batch with prompt tokens that attend to later tokens: images of models with bidirectional attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..core.step_input import StepInput
from ..scheduling.image_spans import ImageSpan
from ..scheduling.request import Request

Ends = NDArray[np.int64]


def visible_ends(images: Sequence[ImageSpan], num_tokens: int) -> Ends:
    """Return the end of the range that each of the first ``num_tokens`` tokens attends to: after the token itself, or
    after its run of image tokens.
    """
    ends = np.arange(1, num_tokens + 1)
    for image in images:
        for first, end in image.bidirectional:
            ends[first:end] = end
    return ends


class VisibleEndsTable:
    """Visible ends by row. Empty, and without cost, while no request has such an image."""

    def __init__(self) -> None:
        self._rows: dict[int, Ends] = {}

    def set_row(self, row: int, request: Request) -> None:
        """Store the visible ends of ``request`` in ``row``, if it has such images."""
        if any(image.bidirectional for image in request.images):
            self._rows[row] = visible_ends(request.images, request.num_prompt_tokens)

    def forget_row(self, row: int) -> None:
        """Drop ``row``, if it is stored."""
        self._rows.pop(row, None)

    def select(self, step: StepInput) -> Ends | None:
        """Return ``[T]``, see ``kernels.paged_attention.PagedBatch``; None if the attention of ``step`` is causal."""
        if not self._rows:
            return None
        ends = step.positions + 1
        token = 0
        for row, num_tokens, num_new_tokens in zip(
            step.rows.tolist(), step.seq_lens.tolist(), step.query_lens.tolist(), strict=True
        ):
            if (row_ends := self._rows.get(row)) is not None:
                new_ends = row_ends[num_tokens - num_new_tokens : num_tokens]
                ends[token : token + len(new_ends)] = new_ends
            token += num_new_tokens
        return None if np.array_equal(ends, step.positions + 1) else ends
