"""Compiles the kernels that launchers would start, for a Hopper GPU, where there is none: a program for a test.

What the interpreter does not check, the compiler does: types, sizes of products, numbers that must be known.

Prints a line of JSON for each kernel: its name, and what went wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

from penstock.kernels.lora import gpu as lora
from penstock.kernels.moe import gpu as moe
from penstock.kernels.penalties import gpu as penalties
from penstock.kernels.quantized_linear import gpu as quantized_linear
from penstock.kernels.sampling import Draws
from penstock.kernels.sampling import gpu as sampling

HOPPER = GPUTarget("cuda", 90, 32)
BF16 = torch.bfloat16
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}
_seen: set[str] = set()


def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """What ``kernel[grid](...)`` calls: compiles for its arguments, with the assumptions Triton makes of them."""
    del grid, warmup
    options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **named}
    signature, constants, hints = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        kind = _kind(value, parameter.is_constexpr, parameter.do_not_specialize)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif kind.startswith("*") or (kind == "i32" and value % 16 == 0 and not parameter.do_not_specialize):
            hints[(index,)] = [["tt.divisibility", 16]]
    about = f"{kernel.__name__} {signature} {constants} {options}"
    if about in _seen:
        return
    _seen.add(about)
    error = None
    try:
        compile(ASTSource(kernel, signature, constants, hints), target=HOPPER, options=options)
    except Exception as problem:  # each is told, not only the first
        error = repr(problem)
    sys.stdout.write(json.dumps({"kernel": about, "error": error}) + "\n")


def _kind(value: Any, is_constexpr: bool, is_any: bool) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if is_constexpr or (isinstance(value, int) and value == 1 and not is_any):
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def call_all() -> None:
    """Each launcher, in the ways that lead to other kernels."""
    for num_rows, vocab_size, dtype in ((3, 1000, torch.float32), (16, 151_936, BF16)):
        ones, zeros = torch.ones(num_rows), torch.zeros(num_rows)
        draws = Draws(ones, zeros.long(), ones, zeros, zeros.double())
        sampling.sample(torch.empty(num_rows, vocab_size, dtype=dtype), draws)
    places, changes = torch.zeros(5, dtype=torch.int64), torch.ones(5)
    penalties.penalize(torch.zeros(4, 100), places, places, changes, changes)
    for num_tokens in (1, 300):
        weights, ids = moe.route(torch.empty(num_tokens, 8, dtype=BF16), 2, "sigmoid", True, torch.empty(8), 1.0)
        gate_up, down = torch.empty(8, 512, 256, dtype=BF16), torch.empty(8, 256, 256, dtype=BF16)
        moe.experts(torch.empty(num_tokens, 256, dtype=BF16), gate_up, down, weights, ids)
    for kind in (torch.int8, torch.float8_e4m3fn):
        for num_tokens in (1, 300):
            rows, scales = quantized_linear.quantize_rows(torch.empty(num_tokens, 512, dtype=BF16), kind)
            values, bias = torch.empty(256, 512, dtype=kind), torch.empty(256, dtype=BF16)
            quantized_linear.multiply(rows, scales, values, torch.empty(256), bias, BF16)
    token_lora = torch.zeros(40, dtype=torch.int32)
    small = lora.lora_shrink(torch.empty(40, 1000, dtype=BF16), torch.empty(4, 16, 1000, dtype=BF16), token_lora)
    lora.lora_expand(small, torch.empty(4, 512, 16, dtype=BF16), token_lora, torch.empty(40, 512, dtype=BF16), 1.0)


if __name__ == "__main__":
    instead: Callable[..., None] = compile_instead
    JITFunction.run = instead
    call_all()
