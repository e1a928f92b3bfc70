"""Sizes by where kernels run: the interpreter takes a tenth of a second for a program, a GPU a few microseconds."""

from __future__ import annotations

import torch


def many(on_gpu: int, interpreted: int) -> int:
    """How many rows to take, where a kernel does the same for each: the fewer lead through the same code."""
    return on_gpu if torch.cuda.is_available() else interpreted
