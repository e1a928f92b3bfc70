"""MXFP4 as gpt-oss has it: experts in blocks of 32 values of four bits, a power of two for each block.

Source: OCP Microscaling Formats (MX) Specification 1.0; the layout is that of openai/gpt-oss.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....shared.errors import ModelLoadError
from .declared import Quantization
from .scaled import MX_BLOCK
from .stored import StoredTensors
from .unpacked import Readable, Unpacked, make_grid, unpack_e2m1, write_scaled

_BLOCKS, _SCALES = "_blocks", "_scales"


def read_mxfp4(stored: StoredTensors, _quantization: Quantization, dtype: torch.dtype) -> Readable:
    """``X_blocks`` [E, O, I / 32, 16] and ``X_scales`` [E, O, I / 32], both uint8, are ``X`` [E, I, O]."""
    made: Readable = {}
    for name in (name for name in stored if name.endswith(_BLOCKS)):
        whole = name.removesuffix(_BLOCKS)
        scales = whole + _SCALES
        if scales not in stored or stored.shape(scales) != stored.shape(name)[:3]:
            raise ModelLoadError(f"{name} needs {scales} of [experts, rows, blocks]; fetch the model again")
        num_experts, num_rows, num_blocks, num_bytes = stored.shape(name)
        shape = (num_experts, num_blocks * num_bytes * 2, num_rows)
        made[whole] = Unpacked(shape, dtype, partial(_write, blocks=stored.slice(name), scales=stored.slice(scales)))
    return made


def _write(out: Tensor, blocks: Any, scales: Any) -> None:
    for expert, transposed in enumerate(out):
        packed, matrix = blocks[expert].flatten(1), transposed.T
        grid = make_grid("its scales", (matrix.shape[0], matrix.shape[1]), scales[expert], None, MX_BLOCK)
        write_scaled(matrix, lambda rows, packed=packed: unpack_e2m1(packed[rows]), grid)
