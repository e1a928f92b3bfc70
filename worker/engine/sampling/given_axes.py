"""Rows of the batch with positions in three axes: requests with images, for models whose rotary embedding uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.step_input import StepInput
from ..scheduling.image_spans import ImageSpan
from ..scheduling.request import Request

Axes = NDArray[np.int64]


@dataclass
class _RowAxes:
    """Positions of one request: ``prompt_axes [3, P]``; a token after the prompt is at its index plus ``shift``."""

    prompt_axes: Axes
    shift: int

    def at(self, start: int, stop: int) -> Axes:
        """Return the positions of the request's tokens ``start .. stop``, ``[3, stop - start]``."""
        prompt_part = self.prompt_axes[:, start:stop]
        output_part = np.arange(start + prompt_part.shape[1], stop) + self.shift
        return np.concatenate([prompt_part, np.broadcast_to(output_part, (3, len(output_part)))], axis=1)


class AxesTable:
    """Positions in three axes by row. Empty, and without cost, while no request has an image with such positions."""

    def __init__(self) -> None:
        self._rows: dict[int, _RowAxes] = {}

    def set_row(self, row: int, request: Request) -> None:
        """Store the positions of ``request`` in ``row``, if it has such images."""
        if any(image.axes is not None for image in request.images):
            self._rows[row] = _axes_of(request.num_prompt_tokens, request.images)

    def forget_row(self, row: int) -> None:
        """Drop ``row``, if it is stored."""
        self._rows.pop(row, None)

    def select(self, step: StepInput) -> Axes | None:
        """Return positions ``[3, T]`` of the tokens of ``step``; None if each token's are the same in all axes."""
        if not self._rows or not any(row in self._rows for row in step.rows.tolist()):
            return None
        axes = np.tile(step.positions, (3, 1))
        ends = np.cumsum(step.query_lens).tolist()
        for row, end, num_tokens, num_new_tokens in zip(
            step.rows.tolist(), ends, step.seq_lens.tolist(), step.query_lens.tolist(), strict=True
        ):
            if (row_axes := self._rows.get(row)) is not None:
                axes[:, end - num_new_tokens : end] = row_axes.at(num_tokens - num_new_tokens, num_tokens)
        return axes


def _axes_of(num_prompt_tokens: int, images: Sequence[ImageSpan]) -> _RowAxes:
    axes = np.empty((3, num_prompt_tokens), np.int64)
    token = position = 0
    for image in images:
        axes[:, token : image.start] = np.arange(image.start - token) + position
        position += image.start - token
        image_axes = np.arange(image.stop - image.start) if image.axes is None else image.axes
        axes[:, image.start : image.stop] = image_axes + position
        position += int(image_axes.max()) + 1
        token = image.stop
    axes[:, token:] = np.arange(num_prompt_tokens - token) + position
    return _RowAxes(axes, position - token)
