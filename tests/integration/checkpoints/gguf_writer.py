"""Writes GGUF files, and blocks of drawn numbers with what they stand for, from the side of ggml's C."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ALIGNMENT = 32
# ggml's numbers of types.
NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13}
NUMBERS |= {"Q6_K": 14, "BF16": 30, "IQ4_XS": 23}


@dataclass
class Blocks:
    """Args: data: [rows, bytes of a row] uint8; weight: what they stand for, [rows, columns] float32."""

    kind: str
    data: Array
    weight: Array


def write_gguf(
    path: Path, values: dict[str, Any], tensors: dict[str, Blocks], shapes: dict[str, tuple[int, ...]]
) -> Path:
    """Args: shapes: of those tensors that are no matrices."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
    head += [_text(key) + _value(value) for key, value in values.items()]
    offset, contents = 0, []
    for name, blocks in tensors.items():
        shape = shapes.get(name, blocks.weight.shape)[::-1]
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head.append(_text(name) + sizes + struct.pack("<IQ", NUMBERS[blocks.kind], offset))
        content = blocks.data.tobytes()
        contents.append(content + bytes(-len(content) % ALIGNMENT))
        offset += len(contents[-1])
    begin = b"".join(head)
    path.write_bytes(begin + bytes(-len(begin) % ALIGNMENT) + b"".join(contents))
    return path


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        # In lists llama.cpp wants its integers with a sign.
        kind = 5 if isinstance(value[0], int) else _kind(value[0])
        items = (_text(each) if isinstance(each, str) else struct.pack(f"<{_CODES[kind]}", each) for each in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)
    kind = _kind(value)
    return struct.pack("<I", kind) + (_text(value) if kind == 8 else struct.pack(f"<{_CODES[kind]}", value))


_CODES = {4: "I", 5: "i", 6: "f", 7: "?"}


def _kind(value: Any) -> int:
    return {bool: 7, str: 8, float: 6, int: 4}[type(value)]


Draw = Callable[[np.random.Generator, int], tuple[Array, Array]]


def draw(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> Blocks:
    """Random blocks of ``kind`` for a matrix."""
    size, block = _DRAWS[kind]
    data, weight = block(rng, shape[0] * shape[1] // size)
    return Blocks(kind, data.reshape(shape[0], -1), weight.astype(np.float32).reshape(shape))


def plain(kind: str, weight: Array) -> Blocks:
    """``weight``, which ``kind``, F32 or F16, can hold."""
    data = weight.astype(np.float32 if kind == "F32" else np.float16)
    return Blocks(kind, data.view(np.uint8).reshape(len(data), -1), data.astype(np.float32))


def _bytes(*parts: Array) -> Array:
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in parts], 1)


def _half(rng: np.random.Generator, count: int, scale: float) -> Array:
    return (scale * rng.uniform(0.5, 1.0, (count, 1))).astype(np.float16)


def _in_halves(values: Array) -> Array:
    """ggml's order of four bits: value i and value i + half share a byte."""
    low, high = np.split(values, 2, axis=-1)
    return ((low & 15) | ((high & 15) << 4)).astype(np.uint8)


def _fifths(values: Array) -> Array:
    bits = np.zeros((len(values), 1), np.uint32)
    for index in range(32):
        bits[:, 0] |= ((values[:, index] >> 4) & 1).astype(np.uint32) << np.uint32(index)
    return bits


def _small(bits: int, *, has_minimum: bool) -> Draw:
    """Q4_0, Q4_1, Q5_0, Q5_1."""

    def block(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        scale, minimum = _half(rng, count, 0.6 / (1 << bits)), _half(rng, count, -0.3)
        values = rng.integers(0, 1 << bits, (count, 32))
        parts = [scale, *([minimum] if has_minimum else []), *([_fifths(values)] if bits == 5 else [])]
        offset = minimum.astype(float) if has_minimum else -float(1 << (bits - 1)) * scale.astype(float)
        return _bytes(*parts, _in_halves(values)), scale.astype(float) * values + offset

    return block


def _q8_0(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    scale, values = _half(rng, count, 0.003), rng.integers(-127, 128, (count, 32)).astype(np.int8)
    return _bytes(scale, values), scale.astype(float) * values


def _k_scales(scales: Array, minimums: Array) -> Array:
    """Eight of six bits each, twice, in twelve bytes, as ``quantize_row_q4_K_ref`` puts them there."""
    packed = np.zeros((len(scales), 12), np.uint8)
    for part in range(8):
        scale, minimum = scales[:, part].astype(np.uint8), minimums[:, part].astype(np.uint8)
        if part < 4:
            packed[:, part], packed[:, part + 4] = scale, minimum
        else:
            packed[:, part + 4] = (scale & 15) | ((minimum & 15) << 4)
            packed[:, part - 4] |= (scale >> 4) << 6
            packed[:, part] |= (minimum >> 4) << 6
    return packed


def _k(bits: int) -> Draw:
    """Q4_K and Q5_K."""

    def block(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        scale, minimum = _half(rng, count, 0.01 / (1 << bits)), _half(rng, count, 0.005)
        scales, minimums = rng.integers(0, 64, (count, 8)), rng.integers(0, 64, (count, 8))
        values = rng.integers(0, 1 << bits, (count, 8, 32))
        packed = [_in_halves(values[:, part : part + 2].reshape(count, 64)) for part in range(0, 8, 2)]
        fifths = np.zeros((count, 32), np.uint8)
        for part in range(8):
            fifths |= (((values[:, part] >> 4) & 1) << part).astype(np.uint8)
        parts = [scale, minimum, _k_scales(scales, minimums), *([fifths] if bits == 5 else []), *packed]
        exact = (scale.astype(float) * scales)[..., None] * values - (minimum.astype(float) * minimums)[..., None]
        return _bytes(*parts), exact

    return block


def _q6_k(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    scale = _half(rng, count, 0.0002)
    scales = rng.integers(-128, 128, (count, 16)).astype(np.int8)
    values = rng.integers(0, 64, (count, 2, 4, 32))
    low = [
        [half[:, 0] & 15 | (half[:, 2] & 15) << 4, half[:, 1] & 15 | (half[:, 3] & 15) << 4]
        for half in (values[:, 0], values[:, 1])
    ]
    high = [((half >> 4) << np.arange(0, 8, 2)[:, None]).sum(1) for half in (values[:, 0], values[:, 1])]
    parts = [each.astype(np.uint8) for each in (*low[0], *low[1], *high)]
    exact = (scale.astype(float) * scales)[..., None] * (values.reshape(count, 16, 16) - 32)
    return _bytes(*parts, scales, scale), exact


def _bf16(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    bits = (rng.normal(0, 0.1, (count, 1)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits.view(np.uint8), (bits.astype(np.uint32) << 16).view(np.float32)


def _f16(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    values = rng.normal(0, 0.1, (count, 1)).astype(np.float16)
    return values.view(np.uint8), values


def _f32(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    values = rng.normal(0, 0.1, (count, 1)).astype(np.float32)
    return values.view(np.uint8), values


_DRAWS: dict[str, tuple[int, Draw]] = {
    "Q4_0": (32, _small(4, has_minimum=False)),
    "Q4_1": (32, _small(4, has_minimum=True)),
    "Q5_0": (32, _small(5, has_minimum=False)),
    "Q5_1": (32, _small(5, has_minimum=True)),
    "Q8_0": (32, _q8_0),
    "Q4_K": (256, _k(4)),
    "Q5_K": (256, _k(5)),
    "Q6_K": (256, _q6_k),
    "BF16": (1, _bf16),
    "F16": (1, _f16),
    "F32": (1, _f32),
}
KINDS = tuple(_DRAWS)
