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
    """Run Triton kernels of this process through its interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        _round_as_a_gpu(patch)
        _remember_numpy_types(patch)
        _remember_block_types(patch)
        _broadcast_where_needed(patch)
        _match_operands_once(patch)
        _call_operations_at_once(patch)
        _check_overflow_at_once(patch)
        # Without this, the interpreter searches the language for functions to replace at every call within a kernel,
        # which takes half of its time.
        replaced = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", lambda _: SimpleNamespace(restore=lambda: None))
        try:
            yield
        finally:
            replaced.restore()


def _round_as_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's conversion between floating types.

    The interpreter truncates to bfloat16, and loses the carry when it rounds to float8. torch converts as GPUs do,
    to the nearest with ties to even, so that results of kernels can be compared with their references bit for bit.
    """
    patch.setattr(interpreter, "_convert_float", _convert)


def _remember_numpy_types(patch: pytest.MonkeyPatch) -> None:
    find = interpreter._get_np_dtype
    of_scalar = functools.cache(find)
    patch.setattr(
        interpreter, "_get_np_dtype", lambda dtype: find(dtype) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    )


def _remember_block_types(patch: pytest.MonkeyPatch) -> None:
    """Cache block types with the shape and size of their tensors; otherwise each operation creates three or four."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    of_scalars: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = getattr(shape, "values", shape)
        if type(element_ty) is not tl.dtype:  # pointer types have more attributes than a name
            make_type(self, element_ty, shape)
            if type(element_ty) is tl.pointer_type:
                self.known_as = (str(element_ty), *[getattr(size, "value", size) for size in sizes])
            return
        key = (element_ty.name, *[getattr(size, "value", size) for size in sizes])
        if key not in types:
            make_type(self, element_ty, shape)
            self.of_tensors = {}  # attributes of all tensors of this type, once one exists
            self.known_as = key
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        attributes = type.__dict__.get("of_tensors") if type.is_block() else of_scalars
        if attributes:
            self.__dict__.update(attributes, handle=handle, type=type, dtype=type.scalar)
            return
        make_tensor(self, handle, type)
        if attributes is not None:
            attributes.update(shape=self.shape, numel=self.numel)

    patch.setattr(tl.block_type, "__init__", init_type)
    patch.setattr(tl.tensor, "__init__", init_tensor)


def _broadcast_where_needed(patch: pytest.MonkeyPatch) -> None:
    """Skip broadcasting if both operands have the same shape, as most have."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if [size.value for size in left.shape] == [size.value for size in right.shape]:
            return left, right
        return broadcast(self, left, right)

    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_if_needed)


def _match_operands_once(patch: pytest.MonkeyPatch) -> None:
    """Cache the conversions of two operands by their types, and the tensors that numbers are converted to.

    The interpreter inspects both types, casts and broadcasts in every operation. Here numpy broadcasts, in the
    operation itself.
    """
    match = TritonSemantic.binary_op_type_checking_impl
    conversions: dict[tuple[Any, ...], tuple[_Conversion, _Conversion]] = {}

    def match_once(self: Any, left: Any, right: Any, *how: Any, **named: Any) -> tuple[Any, Any]:
        left_key, right_key = _cache_key(left), _cache_key(right)
        if left_key is None or right_key is None:
            return match(self, left, right, *how, **named)
        key = (left_key, right_key, how, *named.items())
        pair = conversions.get(key)
        if pair is None:
            matched = match(self, left, right, *how, **named)
            conversions[key] = _Conversion(left, matched[0]), _Conversion(right, matched[1])
            return matched
        return pair[0].apply(self, left), pair[1].apply(self, right)

    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", match_once)


class _Conversion:
    """Conversion of an operand ``old`` to a number, or to another type, shape or both."""

    def __init__(self, old: Any, new: Any) -> None:
        is_tensor = type(old) is tl.tensor
        self._number = None if is_tensor else new
        self._cast_to = new.dtype if is_tensor and new.dtype != old.dtype else None
        self._type = new.type if is_tensor and _sizes_of(new) != _sizes_of(old) else None

    def apply(self, semantic: Any, operand: Any) -> Any:
        if self._number is not None:
            return self._number
        if self._cast_to is not None:
            operand = semantic.cast(operand, self._cast_to)
        return operand if self._type is None else tl.tensor(operand.handle, self._type)


def _sizes_of(tensor: Any) -> list[int]:
    return [size.value for size in tensor.shape]


def _cache_key(operand: Any) -> Any:
    """Return the type of a tensor, or the value of a number; None for an operand that is not cached."""
    kind = type(operand)
    if kind is tl.tensor:
        of_type = operand.type
        return of_type.__dict__.get("known_as") if type(of_type) is tl.block_type else of_type.name
    # Zeros have two signs.
    return (kind, operand) if kind is int or kind is bool or (kind is float and operand) else None


def _call_operations_at_once(patch: pytest.MonkeyPatch) -> None:
    """Call operations with the semantics of the interpreter, without inspecting their keyword arguments."""

    def patch_operation(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        operation = getattr(member, "__wrapped__", member)

        def operate(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return operation(*args, **named)

        scope.set_attr(obj, name, operate)

    unwrap, unwrapped = tl.core._unwrap_if_constexpr, (tl.tensor, int, float, bool, tl.dtype)

    def unwrap_if_needed(value: Any) -> Any:
        return value if type(value) in unwrapped else unwrap(value)

    patch.setattr(interpreter, "_patch_attr", patch_operation)
    patch.setattr(tl.core, "_unwrap_if_constexpr", unwrap_if_needed)


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
