"""The tensors of a GGUF file by transformers' names, unpacked when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.linear.blocks import Blocks
from ....shared.errors import ModelLoadError
from ..formats.tensors import Readable, Unpacked, pieces
from .architectures import find_family
from .blocks import UNPACK, has_parts, read_blocks
from .container import GgufFile, GgufTensor, TensorType, open_gguf
from .families import Family, Place, Target
from .rope import float32_tensor

_Undo = Callable[[Tensor], Tensor] | None


class _Source(NamedTuple):
    """A tensor of the file, or one matrix of it, that fills a tensor of transformers' or a part of one.

    Args:
        scales: factors of the file's numbers: one, or one for each matrix of a stack; None for no factors.
    """

    tensor: GgufTensor
    target: Target
    scales: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        part = self.target.part
        if part is None:
            return self.tensor.shape
        return self.tensor.shape[1:] if isinstance(part, int) else (len(self.data), *self.tensor.shape[1:])

    @property
    def data(self) -> NDArray[np.uint8]:
        return self.tensor.data if self.target.part is None else self.tensor.data[self.target.part]


def read_gguf(path: Path, dtype: torch.dtype) -> Readable:
    """Return every tensor of the model in ``path``, in ``dtype``.

    Raises:
        ModelLoadError: the file, its types or its architecture is not supported.
    """
    file = open_gguf(path)
    family = find_family(file)
    sources: dict[str, list[_Source]] = {}
    scales = _scales_of_nvfp4(file)
    weights = {name.removesuffix(".weight") for name in scales}
    for tensor in file.tensors.values():
        stem, _, kind = tensor.name.rpartition(".")
        if stem in weights and kind in ("scale", "input_scale"):
            continue
        for target in family.targets(tensor.name, tensor.shape):
            sources.setdefault(target.name, []).append(_Source(tensor, target, scales.get(tensor.name)))
    return {name: _unpacked(family, name, parts, dtype) for name, parts in sources.items()}


def _scales_of_nvfp4(file: GgufFile) -> dict[str, Tensor]:
    """Return the second scale of weights in NVFP4, which is one for a matrix. It is a tensor of its own."""
    names = {
        tensor.name: f"{tensor.name.removesuffix('.weight')}.scale"
        for tensor in file.tensors.values()
        if tensor.kind.name == "NVFP4"
    }
    return {
        weight: torch.from_numpy(float32_tensor(file, scale)).flatten()
        for weight, scale in names.items()
        if scale in file.tensors
    }


def _unpacked(family: Family, name: str, sources: list[_Source], dtype: torch.dtype) -> Unpacked:
    shape = sources[0].target.shape
    # Views of a tensor without memory show whether the shapes fit.
    sizes = [_view(family, each.target.place, torch.empty(shape, device="meta")).numel() for each in sources]
    if sizes != [math.prod(each.shape) for each in sources] or sum(sizes) != math.prod(shape):
        parts = ", ".join(f"{each.tensor.name} {list(each.shape)}" for each in sources)
        raise ModelLoadError(
            f"{family.file.path} has {parts}, which do not make up {name} {list(shape)}; fetch it again"
        )

    def write(out: Tensor) -> None:
        for source in sources:
            _write_part(_view(family, source.target.place, out), source)

    source, *others = sources
    is_plain = source.target.place.undo is None and source.scales is None
    takes = not others and len(shape) == 2 and is_plain and has_parts(source.tensor.kind.name)
    return Unpacked(shape, dtype, write, partial(_read_blocks, family, source) if takes else None)


def _read_blocks(family: Family, source: _Source) -> Blocks | None:
    """Return the numbers of a matrix as the file has them; None if our kernels cannot use them."""
    kind, shape = source.tensor.kind, source.target.shape
    order = _order(family, source.target.place, shape)
    if order is None:
        return None
    # A copy, since torch needs writable memory.
    blocks = read_blocks(kind.name, torch.from_numpy(np.array(source.data)).view(-1, kind.num_bytes), shape[0])
    return blocks and blocks.map(lambda rows: rows[order])


def _order(family: Family, place: Place, shape: tuple[int, ...]) -> Tensor | slice | None:
    """Return the file's row for each row of a matrix; None if more than rows is reordered."""
    if place.view is None:
        return slice(None)
    rows = place.view(family, torch.arange(shape[0])[:, None].expand(shape))
    if rows.shape[-1] != shape[1] or not (rows == rows[..., :1]).all():
        return None
    return rows[..., 0].flatten().argsort()


def _view(family: Family, place: Place, out: Tensor) -> Tensor:
    return place.view(family, out) if place.view else out


def _write_part(out: Tensor, source: _Source) -> None:
    """Fill ``out``, which has the numbers of ``source`` in their order, and need not be contiguous."""
    data, kind, undo, scales = source.data, source.tensor.kind, source.target.place.undo, source.scales
    if scales is not None and len(scales) > 1 and isinstance(source.target.part, int):
        scales = scales[source.target.part, None]
    has_scales = scales is not None and len(scales) > 1
    if len(source.shape) == 3 and (has_scales or not out.is_contiguous()):
        # One matrix of a stack of experts at a time.
        for number, (matrix, rows) in enumerate(zip(out, data, strict=True)):
            _copy(matrix, source.shape[1:], rows, kind, _scaled(undo, scales, number if has_scales else 0))
    elif out.is_contiguous():
        _fill(out, data, kind, _scaled(undo, scales))
    else:
        _copy(out, source.shape, data, kind, _scaled(undo, scales))


def _scaled(undo: _Undo, scales: Tensor | None, number: int = 0) -> _Undo:
    """Return ``undo`` after a multiplication by one of ``scales``."""
    if scales is None:
        return undo
    factor = scales[number]
    return lambda values: values * factor if undo is None else undo(values * factor)


def _copy(
    out: Tensor,
    shape: tuple[int, ...],
    data: NDArray[np.uint8],
    kind: TensorType,
    undo: Callable[[Tensor], Tensor] | None,
) -> None:
    values = torch.empty(shape, dtype=out.dtype)
    _fill(values, data, kind, undo)
    out.copy_(values.view(out.shape))


def _fill(out: Tensor, data: NDArray[np.uint8], kind: TensorType, undo: _Undo) -> None:
    unpack = UNPACK[kind.name]
    rows = out.view(math.prod(data.shape[:-1]), -1)
    packed = data.reshape(len(rows), -1)
    for part in pieces(*rows.shape):
        # A copy, since torch needs writable memory.
        blocks = torch.from_numpy(np.array(packed[part])).view(-1, kind.num_bytes)
        values = unpack(blocks).view(-1, rows.shape[1])
        rows[part] = values if undo is None else undo(values)
