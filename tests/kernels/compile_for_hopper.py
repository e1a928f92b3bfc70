"""A program: compiles the Triton kernels for compute capability 9.0, without a GPU, down to machine code.

The interpreter lets pass what the compiler refuses: types, layouts, instructions. Here launchers run on CPU tensors,
and what they launch is compiled, with exactly their types, constants and options, instead of run. Prints a line for
each launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from penstock.kernels.gated_activation import gpu as gated_activation
from penstock.kernels.kv_cache import gpu as kv_cache
from penstock.kernels.rms_norm import gpu as rms_norm
from penstock.kernels.rotary import gpu as rotary

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
}
Launch = Callable[[], Any]


def layer_launches() -> Iterator[Launch]:
    """Of all dtypes, with sizes that are powers of two and not."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (128, 1000, 4096, 32768):
            rows, weight = torch.zeros(3, size, dtype=dtype), torch.zeros(size, dtype=dtype)
            yield lambda rows=rows, weight=weight: rms_norm.rms_norm(rows, weight, 1e-6)
            yield lambda rows=rows, weight=weight: rms_norm.add_rms_norm(rows, rows.clone(), weight, 1e-6)
        gate_up = torch.zeros(3, 6000, dtype=dtype)
        yield lambda gate_up=gate_up: gated_activation.silu_and_mul(gate_up)
        yield lambda gate_up=gate_up: gated_activation.gelu_and_mul(gate_up, "none")
        yield lambda gate_up=gate_up: gated_activation.gelu_and_mul(gate_up, "tanh")
        for head_dim, rotary_dim in ((128, 128), (80, 32)):
            yield from _head_launches(dtype, head_dim, rotary_dim)
    for last in (8, 3):
        cache = torch.zeros(9, 1, 1, last, dtype=torch.bfloat16)
        yield lambda cache=cache: kv_cache.copy_blocks(cache, torch.zeros(2, 2, dtype=torch.int32))


def _head_launches(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> Iterator[Launch]:
    heads = torch.zeros(3, 48, head_dim, dtype=dtype)
    query_key, value = heads.split([40, 8], dim=1)
    angles = torch.zeros(3, rotary_dim, dtype=dtype)
    yield lambda: rotary.apply_rotary(query_key, angles, angles)
    for cache_dtype in (dtype, torch.float8_e4m3fn):
        cache = torch.zeros(4, 16, 8, head_dim, dtype=cache_dtype)
        for slot_dtype in (torch.int32, torch.int64):
            slots = torch.zeros(3, dtype=slot_dtype)
            yield lambda cache=cache, slots=slots: kv_cache.store_kv_cache(value, value, cache, cache, slots, 1.0, 1.0)
            yield lambda cache=cache, slots=slots: rotary.rotary_and_store(
                query_key, value, angles, angles, cache, cache, slots, 1.0, 1.0
            )


def compile_launch(self: JITFunction[Any], *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
    """In the place of ``JITFunction.run``."""
    given = dict(zip(self.arg_names, args, strict=False)) | kwargs
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(self.params):
        value = given.pop(parameter.name)
        is_specialized = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_specialized and type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_of(value)
        number = value.data_ptr() if isinstance(value, Tensor) else value
        if is_specialized and isinstance(number, int) and number % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(self, signature, constants, attributes)
    compiled = triton.compile(source, target=HOPPER, options=given)
    types = " ".join(kind for kind in signature.values() if kind != "constexpr")
    sys.stdout.write(f"{self.fn.__name__}({types}) {constants}: {len(compiled.asm['cubin'])} bytes\n")


def _type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


if __name__ == "__main__":
    JITFunction.run = compile_launch
    for launch in layer_launches():
        launch()
