"""The tensors of a GGUF file by transformers' names, made whole when they are asked for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....shared.errors import ModelLoadError
from ..formats.unpacked import Readable, Unpacked, pieces
from .blocks import UNPACK
from .container import GgufTensor, TensorType, open_gguf
from .families import Family, find_family


def read_gguf(path: Path, dtype: torch.dtype) -> Readable:
    """Every tensor of the model in ``path``, in ``dtype``.

    Raises:
        ModelLoadError: the file, its types or its architecture is not what is read here.
    """
    file = open_gguf(path)
    family = find_family(file)
    made: Readable = {}
    for tensor in file.tensors.values():
        names = family.names(tensor.name, tensor.shape)
        if isinstance(names, str):
            made[names] = _whole(tensor, dtype, _num_heads(family, tensor))
        else:
            # Of a stack of experts each by itself, as transformers' files have them.
            made |= {name: _part(tensor, number, dtype) for number, name in enumerate(names)}
    return made


def _num_heads(family: Family, tensor: GgufTensor) -> int | None:
    """How many heads are to be put into transformers' order; None if they are in it."""
    num_heads = family.num_interleaved_heads(tensor.name)
    if num_heads is not None and tensor.shape[0] % (2 * num_heads):
        raise ModelLoadError(
            f"{family.file.path} has {tensor.name} with {tensor.shape[0]} rows, which are not {num_heads} heads "
            f"({family.key}.attention.head_count, or head_count_kv); fetch it again"
        )
    return num_heads


def _whole(tensor: GgufTensor, dtype: torch.dtype, num_heads: int | None) -> Unpacked:
    def write(out: Tensor) -> None:
        _fill(out, tensor.data, tensor.kind)
        if num_heads is not None:
            # llama.cpp rotates neighbours, transformers halves of a head.
            pairs = out.unflatten(0, (num_heads, -1, 2)).transpose(1, 2)
            out.copy_(pairs.reshape(out.shape))

    return Unpacked(tensor.shape, dtype, write)


def _part(tensor: GgufTensor, number: int, dtype: torch.dtype) -> Unpacked:
    return Unpacked(tensor.shape[1:], dtype, partial(_fill, data=tensor.data[number], kind=tensor.kind))


def _fill(out: Tensor, data: NDArray[np.uint8], kind: TensorType) -> None:
    unpack = UNPACK[kind.name]
    rows = out.view(-1, out.shape[-1])
    held = data.reshape(len(rows), -1)
    for part in pieces(*rows.shape):
        # A copy, since torch wants memory that may be written to.
        blocks = torch.from_numpy(np.array(held[part])).view(-1, kind.num_bytes)
        rows[part] = unpack(blocks).view(-1, rows.shape[1])
