"""A program: compiles the Triton kernels for compute capability 9.0, without a GPU, down to machine code.

The interpreter lets pass things that the compiler refuses: types, layouts, instructions. Here launchers run on CPU
tensors, and their launches are compiled, with exactly their types, constants and options, instead of run. Prints a line
for each launch. ``--brief``: each kernel once or twice, which takes a fifth of the time.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from launches import all_launches  # next to this program
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
}


def compile_launch(self: JITFunction[Any], *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
    """In the place of ``JITFunction.run``."""
    # Written anew for each kernel: a parameter may have a name that Triton has a use for itself.
    create_function_from_signature(self.signature, self.params, make_backend(HOPPER))(*args, **kwargs)
    arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(self.params):
        value = arguments.pop(parameter.name)
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
    compiled = triton.compile(source, target=HOPPER, options=arguments)
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
    for launch in all_launches(is_brief="--brief" in sys.argv[1:]):
        launch()
