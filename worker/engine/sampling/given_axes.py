"""The rows of the batch whose tokens have positions in three axes: those with images of models that turn by them."""

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
    """Of one request: ``of_prompt [3, P]``, and what is added to the place of a token behind the prompt."""

    of_prompt: Axes
    shift: int

    def at(self, start: int, stop: int) -> Axes:
        """Of the request's tokens ``start .. stop``, ``[3, stop - start]``."""
        known = self.of_prompt[:, start:stop]
        behind = np.arange(start + known.shape[1], stop) + self.shift
        return np.concatenate([known, np.broadcast_to(behind, (3, len(behind)))], axis=1)


class GivenAxesTable:
    """Empty, and free of cost, while no request has an image with such positions."""

    def __init__(self) -> None:
        self._rows: dict[int, _RowAxes] = {}

    def set_row(self, row: int, request: Request) -> None:
        """Take up ``request`` in ``row``, if it has such images."""
        if any(image.axes is not None for image in request.images):
            self._rows[row] = _axes_of(request.num_prompt_tokens, request.images)

    def forget_row(self, row: int) -> None:
        """Drop ``row``, if it is here."""
        self._rows.pop(row, None)

    def take(self, step: StepInput) -> Axes | None:
        """Positions ``[3, T]`` of the tokens of ``step``; None if those of each are the same in all axes."""
        if not self._rows or not any(row in self._rows for row in step.rows.tolist()):
            return None
        axes = np.tile(step.positions, (3, 1))
        ends = np.cumsum(step.query_lens).tolist()
        for row, end, num_tokens, num_new_tokens in zip(
            step.rows.tolist(), ends, step.seq_lens.tolist(), step.query_lens.tolist(), strict=True
        ):
            if (own := self._rows.get(row)) is not None:
                axes[:, end - num_new_tokens : end] = own.at(num_tokens - num_new_tokens, num_tokens)
        return axes


def _axes_of(num_prompt_tokens: int, images: Sequence[ImageSpan]) -> _RowAxes:
    axes = np.empty((3, num_prompt_tokens), np.int64)
    token = position = 0
    for image in images:
        axes[:, token : image.start] = np.arange(image.start - token) + position
        position += image.start - token
        own = np.arange(image.stop - image.start) if image.axes is None else image.axes
        axes[:, image.start : image.stop] = own + position
        position += int(own.max()) + 1
        token = image.stop
    axes[:, token:] = np.arange(num_prompt_tokens - token) + position
    return _RowAxes(axes, position - token)
