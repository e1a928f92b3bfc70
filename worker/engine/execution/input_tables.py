"""Rows of the batch with special inputs: embeddings, positions in three axes, and bidirectional attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....shared.params.prompts import PromptEmbeds
from ..core.step_input import StepInput
from ..scheduling.prompt_inputs import ImageSpan
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
