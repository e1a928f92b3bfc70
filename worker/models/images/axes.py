"""Positions of an image's tokens in three axes: time, rows and columns, as Qwen's models turn queries and keys by.

A token of text has the same position in all three. The tokens of an image have that of their patch, counted from where
the image begins; what follows goes on behind the longer side. So positions are fewer than tokens, and those of what is
generated lag behind by as many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Axes = NDArray[np.int64]
AxesOf = Callable[[Mapping[str, Tensor]], Axes]

_GRID = "image_grid_thw"


def axes_by_grid(model_config: Any) -> AxesOf:
    """What makes the positions ``[3, N]`` of an image's ``N`` tokens, from its first, of the tensors for the tower."""
    merge = int(model_config.vision_config.spatial_merge_size)

    def axes_of(tensors: Mapping[str, Tensor]) -> Axes:
        (times, rows, columns), *_ = tensors[_GRID].tolist()
        grid = np.meshgrid(np.arange(times), np.arange(rows // merge), np.arange(columns // merge), indexing="ij")
        return np.stack([axis.ravel() for axis in grid])

    return axes_of
