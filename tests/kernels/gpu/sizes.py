"""Sizes by where kernels run: the interpreter takes a tenth of a second for a program, a GPU a few microseconds."""

from __future__ import annotations

import torch


def many(on_gpu: int, interpreted: int) -> int:
    """Return the number of rows; fewer rows run the same code, because a kernel does the same for each row."""
    return on_gpu if torch.cuda.is_available() else interpreted
