"""Triton's interpreter, rounding as a GPU does, and in a quarter of the time."""

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
from triton.language.semantic import TritonSemantic
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
        _remember_block_types(patch)
        _broadcast_where_needed(patch)
        _check_overflow_at_once(patch)
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


def _remember_block_types(patch: pytest.MonkeyPatch) -> None:
    """Make a type of blocks once, with the shape and size of its tensors; each operation makes three or four anew."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    of_scalars: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not tl.dtype:  # pointers have more to them than a name
            make_type(self, element_ty, shape)
            return
        sizes = getattr(shape, "values", shape)
        key = (element_ty.name, *[getattr(size, "value", size) for size in sizes])
        if key not in known:
            make_type(self, element_ty, shape)
            self.of_tensors = {}  # what all tensors of such types have, once there is one
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        told = type.__dict__.get("of_tensors") if type.is_block() else of_scalars
        if told:
            self.__dict__.update(told, handle=handle, type=type, dtype=type.scalar)
            return
        make_tensor(self, handle, type)
        if told is not None:
            told.update(shape=self.shape, numel=self.numel)

    patch.setattr(tl.block_type, "__init__", init_type)
    patch.setattr(tl.tensor, "__init__", init_tensor)


def _broadcast_where_needed(patch: pytest.MonkeyPatch) -> None:
    """Leave the two sides of an operation alone that have one shape, as most have."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if [size.value for size in left.shape] == [size.value for size in right.shape]:
            return left, right
        return broadcast(self, left, right)

    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_if_needed)


def _check_overflow_at_once(patch: pytest.MonkeyPatch) -> None:
    """Look for sums and products that are too large by numpy, in place of ten operations of the interpreter."""
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, left: Any, right: Any, operation: Any) -> None:
        scalar = left.type.scalar
        if scalar.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        assert scalar == right.type.scalar
        wide = operations[operation.__name__](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
        is_within = (wide >= scalar.get_int_min_value()) & (wide <= scalar.get_int_max_value())
        assert is_within.all(), f"int{scalar.int_bitwidth} overflow detected for operation {operation.__name__}"

    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check)


def _convert(numbers: Any, input_dtype: tl.dtype, output_dtype: tl.dtype, _: Any) -> Any:
    """From an array of ``input_dtype``, or of its bits, to an array of the bits of ``output_dtype``."""
    source, target = _TORCH[input_dtype], _TORCH[output_dtype]
    bits = torch.from_numpy(np.ascontiguousarray(numbers).view(f"u{source.itemsize}"))
    return bits.view(source).to(target).view(_BITS[target.itemsize]).numpy().reshape(numbers.shape)
