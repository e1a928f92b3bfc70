"""Triton's interpreter, rounding as a GPU does, and in half the time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
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


@contextmanager
def interpreted() -> Iterator[None]:
    """What this process runs of Triton meanwhile goes through its interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        _round_as_a_gpu(patch)
        _remember_numpy_types(patch)
        # It would search the language for all that is to be replaced whenever one function of a kernel calls another,
        # which is half of the time that it takes.
        replaced = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda _: SimpleNamespace(restore=lambda: None))
        try:
            yield
        finally:
            replaced.restore()


def _round_as_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's conversion between floating types.

    Its own cuts off the digits that bfloat16 has no room for, and loses the carry when it rounds to float8; torch
    converts as the hardware does: to the nearest, ties to even. Else no kernel could be compared with its reference to
    the last bit.
    """
    patch.setattr(interpreter, "_convert_float", _convert)


def _remember_numpy_types(patch: pytest.MonkeyPatch) -> None:
    find = interpreter._get_np_dtype
    of_scalar = functools.cache(find)
    patch.setattr(
        interpreter, "_get_np_dtype", lambda dtype: find(dtype) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    )


def _convert(numbers: Any, input_dtype: tl.dtype, output_dtype: tl.dtype, _: Any) -> Any:
    """From an array of ``input_dtype``, or of its bits, to an array of the bits of ``output_dtype``."""
    source, target = _TORCH[input_dtype], _TORCH[output_dtype]
    bits = torch.from_numpy(np.ascontiguousarray(numbers).view(f"u{source.itemsize}"))
    return bits.view(source).to(target).view(_BITS[target.itemsize]).numpy().reshape(numbers.shape)
