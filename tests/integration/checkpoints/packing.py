"""Packs drawn integers as each format of safetensors checkpoints has them, and says what weight they are.

Independent of what reads them: written from the side of who packs, and the weight is computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Which of eight columns AWQ puts into a word first, second, ...
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Packed:
    """Args: tensors: by the ends of their names, after the layer's; weight: what they stand for, [O, I] float32."""

    tensors: dict[str, Tensor]
    weight: Tensor


@dataclass(frozen=True)
class Format:
    """A format with its ``quantization_config``, and what packs a drawn weight of a shape in it."""

    settings: dict[str, Any]
    pack: Callable[[np.random.Generator, tuple[int, int]], Packed]
    # Of the KV cache and of activations, which are to be passed over.
    beside: tuple[str, ...] = ()


def words(values: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Unsigned ``values`` [..., N] in int32 [..., ceil(N * bits / 32)], the first in the lowest bits."""
    count = 32 // bits
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % count)])
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // count), np.uint32)
    for place, column in enumerate(order or range(count)):
        packed |= values[..., column::count].astype(np.uint32) << np.uint32(place * bits)
    return packed.view(np.int32)


def half(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> Array:
    return (scale * rng.uniform(0.5, 1.0, shape)).astype(np.float16)


def tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def whole(values: Array, zeros: Array | int, scales: Array) -> Tensor:
    """(value - zero) x scale, rounded once to float32."""
    exact = (values.astype(np.float64) - zeros) * scales.astype(np.float64)
    return tensor(exact.astype(np.float32))


def gptq(
    bits: int = 4, *, second: bool = False, order: bool = False, symmetric: bool = False, group: int = 32
) -> Format:
    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        outputs, inputs = shape
        groups = inputs // group
        values = rng.integers(0, 1 << bits, shape)
        zeros = (
            np.full((groups, outputs), 1 << (bits - 1)) if symmetric else rng.integers(0, 1 << bits, (groups, outputs))
        )
        scales = half(rng, (groups, outputs), 0.6 / (1 << bits))
        columns = np.arange(inputs) // group
        if order:
            columns = rng.permutation(columns)
        stored = words(zeros, bits)
        if not second:
            # As GPTQModel lowers them: whole words.
            ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
            stored = (stored.view(np.uint32) - ones).view(np.int32)
        tensors = {"qweight": tensor(words(values, bits).T), "qzeros": tensor(stored), "scales": tensor(scales)}
        if order:
            tensors["g_idx"] = tensor(columns.astype(np.int32))
        return Packed(tensors, whole(values, zeros[columns].T, scales[columns].T))

    version = {"checkpoint_format": "gptq_v2"} if second else {}
    return Format({"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, **version}, pack)


def awq(group: int = 32) -> Format:
    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        outputs, inputs = shape
        values = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(0, 16, (inputs // group, outputs))
        scales = half(rng, zeros.shape, 0.04)
        columns = np.arange(inputs) // group
        tensors = {
            "qweight": tensor(words(values, 4, AWQ_COLUMNS)),
            "qzeros": tensor(words(zeros, 4, AWQ_COLUMNS)),
            "scales": tensor(scales),
        }
        return Packed(tensors, whole(values.T, zeros[columns].T, scales[columns].T))

    return Format({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}, pack)


def scheme(format: str, **weights: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packed_ints(bits: int = 4, *, symmetric: bool = True, group: int | None = 32) -> Format:
    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        outputs, inputs = shape
        lowest, size = -(1 << (bits - 1)), group or inputs
        values = rng.integers(lowest, -lowest, shape)
        zeros = (
            np.zeros((outputs, inputs // size), int)
            if symmetric
            else rng.integers(lowest, -lowest, (outputs, inputs // size))
        )
        scales = half(rng, zeros.shape, 0.6 / (1 << bits))
        columns = np.arange(inputs) // size
        tensors = {
            "weight_packed": tensor(words(values - lowest, bits)),
            "weight_scale": tensor(scales),
            "weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = tensor(words((zeros - lowest).T, bits).T)
        return Packed(tensors, whole(values, zeros[:, columns], scales[:, columns]))

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return Format(scheme("pack-quantized", type="int", num_bits=bits, symmetric=symmetric, **strategy), pack)


def int_quantized(*, symmetric: bool = True) -> Format:
    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        values = rng.integers(-128, 128, shape).astype(np.int8)
        zeros = (
            np.zeros((shape[0], 1), np.int8) if symmetric else rng.integers(-128, 128, (shape[0], 1)).astype(np.int8)
        )
        scales = half(rng, zeros.shape, 0.003)
        more = {} if symmetric else {"weight_zero_point": tensor(zeros)}
        return Packed({"weight": tensor(values), "weight_scale": tensor(scales), **more}, whole(values, zeros, scales))

    return Format(scheme("int-quantized", type="int", num_bits=8, strategy="channel", symmetric=symmetric), pack)


def float8(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.normal(0, 50, shape)).clamp(-448, 448).to(torch.float8_e4m3fn)


def scaled_float8(
    values: Tensor, scales: Array, steps: tuple[int, int], name: str, stored: Tensor | None = None
) -> Packed:
    """Args: steps: rows and columns that share a scale; stored: the scales as they are written."""
    spread = scales.repeat(steps[0], 0).repeat(steps[1], 1)[: values.shape[0], : values.shape[1]]
    weight = whole(values.float().numpy(), 0, spread)
    return Packed({"weight": values, name: tensor(scales) if stored is None else stored}, weight)


def block_float8(block: tuple[int, int] = (48, 32)) -> Format:
    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        grid = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
        scales = (0.006 * rng.uniform(0.5, 1, grid)).astype(np.float32)
        return scaled_float8(float8(rng, shape), scales, block, "weight_scale_inv")

    return Format({"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}, pack)


def row_float8(name: str = "weight_scale", settings: dict[str, Any] | None = None, *, is_whole: bool = False) -> Format:
    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        scales = (0.006 * rng.uniform(0.5, 1, (1 if is_whole else shape[0], 1))).astype(np.float32)
        stored = torch.tensor(scales[0, 0]) if is_whole else None
        steps = (shape[0] if is_whole else 1, shape[1])
        return scaled_float8(float8(rng, shape), scales, steps, name, stored)

    beside = ("input_scale", "k_scale") if is_whole else ()
    return Format(settings or {"quant_method": "fp8", "activation_scheme": "static"}, pack, beside)


def mx_float8(name: str, settings: dict[str, Any]) -> Format:
    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        exponents = rng.integers(117, 121, (shape[0], shape[1] // 32)).astype(np.uint8)
        return scaled_float8(float8(rng, shape), 2.0 ** (exponents - 127.0), (1, 32), name, tensor(exponents))

    return Format(settings, pack)


def four_bit_floats(group: int) -> Format:
    """compressed-tensors' MX (groups of 32) or NV (of 16)."""

    def pack(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        codes = rng.integers(0, 16, shape)
        tensors = {"weight_packed": tensor((codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8))}
        if group == 32:
            exponents = rng.integers(122, 126, (shape[0], shape[1] // group)).astype(np.uint8)
            tensors["weight_scale"], scales = tensor(exponents), 2.0 ** (exponents - 127.0)
        else:
            small = float8(rng, (shape[0], shape[1] // group)).abs()
            tensors |= {"weight_scale": small, "weight_global_scale": torch.tensor([900.0])}
            scales = (small.float() / 900.0).numpy()
        return Packed(tensors, whole(E2M1[codes], 0, scales.repeat(group, 1)))

    kind = "mxfp4-pack-quantized" if group == 32 else "nvfp4-pack-quantized"
    return Format(scheme(kind, type="float", num_bits=4, strategy="group", group_size=group), pack)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
FORMATS: dict[str, Format] = {
    "gptq": gptq(),
    "gptq_symmetric_order": gptq(symmetric=True, order=True),
    "gptq_v2_8_bits": gptq(8, second=True),
    "gptq_8_bits_order": gptq(8, order=True, group=16),
    "awq": awq(),
    "packed_int4": packed_ints(),
    "packed_int4_zeros": packed_ints(symmetric=False),
    "packed_int8_rows": packed_ints(8, group=None),
    "int_quantized": int_quantized(),
    "int_quantized_zeros": int_quantized(symmetric=False),
    "float_quantized": row_float8(settings=scheme("float-quantized", type="float", num_bits=8, strategy="channel")),
    "naive_quantized": int_quantized(),
    "fp8_blocks": block_float8(),
    "fp8_rows": row_float8(settings={"quant_method": "fbgemm_fp8"}),
    "fp8_whole": row_float8(is_whole=True),
    "modelopt_fp8": row_float8(settings=MODELOPT, is_whole=True),
    "mxfp8": mx_float8("weight_scale_inv", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
    "mxfp8_compressed": mx_float8(
        "weight_scale", scheme("mxfp8-quantized", type="float", num_bits=8, strategy="group", group_size=32)
    ),
    "mxfp4_compressed": four_bit_floats(32),
    "nvfp4_compressed": four_bit_floats(16),
}
FORMATS["naive_quantized"].settings["format"] = "naive-quantized"
