"""Lets Triton's interpreter round as a GPU does.

It cuts off the digits that bfloat16 has no room for, and loses the carry when it rounds to float8; torch converts as
the hardware does: to the nearest, ties to even. Else no kernel could be compared with its reference to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def round_as_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's conversion between floating types."""
    patch.setattr(interpreter, "_convert_float", _convert)


def _convert(numbers: Any, input_dtype: tl.dtype, output_dtype: tl.dtype, _: Any) -> Any:
    """From an array of ``input_dtype``, or of its bits, to an array of the bits of ``output_dtype``."""
    source, target = _TORCH[input_dtype], _TORCH[output_dtype]
    bits = torch.from_numpy(np.ascontiguousarray(numbers).view(f"u{source.itemsize}"))
    return bits.view(source).to(target).view(_BITS[target.itemsize]).numpy().reshape(numbers.shape)
