"""Weights in eight or four bits with scales: fp8 per block, row or tensor, mxfp8, bytes, and MXFP4 as in gpt-oss.

MXFP4 stores experts in blocks of 32 values of four bits, with a power of two per block. Source: OCP Microscaling
Formats (MX) Specification 1.0; the layout is that of openai/gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....shared.errors import ModelLoadError
from .declared import Quantization
from .tensors import Grid, Readable, StoredTensors, Unpacked, make_grid, unpack_e2m1, write_scaled

_BLOCKS, _MX_SCALES = "_blocks", "_scales"

FLOAT8 = ("F8_E4M3", "F8_E5M2")
# DeepSeek's suffix refers to the inverse that it was computed from; it is a factor like the others.
_SCALES = ("_scale_inv", "_scale")
MX_BLOCK = (1, 32)


def read_float8(stored: StoredTensors, quantization: Quantization, dtype: torch.dtype) -> Readable:
    """Read ``X.weight`` in float8 with ``X.weight_scale_inv`` or ``X.weight_scale``, for matrices and stacks of
    them.
    """
    size = quantization.settings.get("weight_block_size")
    block = (int(size[0]), int(size[1])) if size else None
    tensors: Readable = {}
    for name in (name for name in stored if stored.dtype(name) in FLOAT8 and not name.endswith(_SCALES)):
        scale = next((name + end for end in _SCALES if name + end in stored), None)
        if scale is None:
            raise ModelLoadError(
                f"{name} is in float8, and no file has {name}{_SCALES[0]} or {name}{_SCALES[1]}, which say what its "
                "numbers stand for; fetch the model again"
            )
        tensors[name] = unpack_scaled(stored, name, scale, None, block, dtype)
    return tensors


def unpack_scaled(
    stored: StoredTensors,
    name: str,
    scale: str,
    zero_point: str | None,
    block: tuple[int, int] | None,
    dtype: torch.dtype,
) -> Unpacked:
    """Return the tensor ``name`` [O, I] or [E, O, I], stored unpacked, times its scales.

    Raises:
        ModelLoadError: the scales do not fit.
    """
    shape, values = stored.shape(name), stored.slice(name)
    scales = stored.read(scale)
    zeros = None if zero_point is None else stored.read(zero_point)
    block = MX_BLOCK if scales.dtype in (torch.uint8, torch.float8_e8m0fnu) and block is None else block
    if len(shape) == 2:
        grid = make_grid(scale, (shape[0], shape[1]), scales, zeros, block)
        return Unpacked(shape, dtype, partial(write_scaled, values=values.__getitem__, grid=grid))
    if len(shape) != 3:
        raise ModelLoadError(f"{name} is {list(shape)}, which is neither a matrix nor a stack of them")
    # A single scale per matrix may be stored as one number each.
    stacked = scales if scales.dim() > 1 or len(scales) != shape[0] else scales[:, None, None]
    grids = [
        make_grid(scale, (shape[1], shape[2]), each, None if zeros is None else zeros[number], block)
        for number, each in enumerate(stacked.expand(shape[0], *stacked.shape[1:]))
    ]
    return Unpacked(shape, dtype, partial(_write_stack, part=lambda number: _rows_of(values, number), grids=grids))


def _rows_of(values: Tensor, number: int) -> Callable[[slice], Tensor]:
    return lambda rows: values[number, rows]


def _write_stack(out: Tensor, part: Callable[[int], Callable[[slice], Tensor]], grids: list[Grid]) -> None:
    for number, grid in enumerate(grids):
        write_scaled(out[number], part(number), grid)


def read_mxfp4(stored: StoredTensors, _quantization: Quantization, dtype: torch.dtype) -> Readable:
    """Read ``X_blocks`` [E, O, I / 32, 16] and ``X_scales`` [E, O, I / 32], both uint8, as ``X`` [E, I, O]."""
    tensors: Readable = {}
    for name in (name for name in stored if name.endswith(_BLOCKS)):
        whole = name.removesuffix(_BLOCKS)
        scales = whole + _MX_SCALES
        if scales not in stored or stored.shape(scales) != stored.shape(name)[:3]:
            raise ModelLoadError(f"{name} needs {scales} of [experts, rows, blocks]; fetch the model again")
        num_experts, num_rows, num_blocks, num_bytes = stored.shape(name)
        shape = (num_experts, num_blocks * num_bytes * 2, num_rows)
        tensors[whole] = Unpacked(
            shape, dtype, partial(_write_transposed, blocks=stored.slice(name), scales=stored.slice(scales))
        )
    return tensors


def _write_transposed(out: Tensor, blocks: Any, scales: Any) -> None:
    for expert, transposed in enumerate(out):
        packed, matrix = blocks[expert].flatten(1), transposed.T
        grid = make_grid("its scales", (matrix.shape[0], matrix.shape[1]), scales[expert], None, MX_BLOCK)
        write_scaled(matrix, lambda rows, packed=packed: unpack_e2m1(packed[rows]), grid)
