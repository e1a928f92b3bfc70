"""The tensors of a GGUF file by transformers' names, unpacked when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.linear.blocks import Blocks, join_blocks
from ....shared.errors import ModelLoadError
from ..formats.tensors import Readable, Unpacked, pieces
from .architectures import find_family
from .blocks import UNPACK, has_parts, read_blocks
from .container import GgufFile, GgufTensor, TensorType, open_gguf
from .families import Family, Place, Target
from .rope import float32_tensor

_Undo = Callable[[Tensor], Tensor] | None
# ``_outputs_of`` of a file, which computes each result once, since layers have the same places.
_OutputsOf = Callable[[Place, tuple[int, ...], bool], Tensor | None]


class _Source(NamedTuple):
    """A tensor of the file, or one matrix of it, that fills a tensor of transformers' or a part of one.

    Args:
        scales: factors of the file's numbers: one, or one for each matrix of a stack; None for no factors.
    """

    tensor: GgufTensor
    target: Target
    scales: Tensor | None = None

    def of_matrix(self, number: int) -> _Source:
        """Return the matrix of that number of a stack."""
        return self._replace(target=self.target._replace(part=number))

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
    outputs = cache(partial(_outputs_of, family))
    return {name: _unpacked(family, name, parts, dtype, outputs) for name, parts in sources.items()}


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


def _unpacked(family: Family, name: str, sources: list[_Source], dtype: torch.dtype, outputs: _OutputsOf) -> Unpacked:
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

    takes = all(
        each.target.place.undo is None and each.scales is None and has_parts(each.tensor.kind.name) for each in sources
    )
    if takes and len(shape) == 2:
        return Unpacked(shape, dtype, write, partial(_read_blocks, sources, outputs))
    is_transposed = _is_transposed(sources, outputs) if takes and len(shape) == 3 else None
    if is_transposed is not None:
        matrices = partial(_matrices_of, family, sources, dtype, outputs, is_transposed=is_transposed)
        return Unpacked(shape, dtype, write, matrices=matrices)
    return Unpacked(shape, dtype, write)


def _is_transposed(sources: list[_Source], outputs: _OutputsOf) -> bool | None:
    """Return whether a stack has the file's matrices transposed; None if it mixes them."""
    for is_transposed in (False, True):
        if all(outputs(each.target.place, each.target.shape, is_transposed) is not None for each in sources):
            return is_transposed
    return None


def _matrices_of(
    family: Family, sources: list[_Source], dtype: torch.dtype, outputs: _OutputsOf, *, is_transposed: bool
) -> list[Unpacked]:
    """Return the matrices [O, I] of a stack of experts."""

    def matrix(number: int) -> Unpacked:
        parts = [each.of_matrix(number) for each in sources]
        _, *shape = sources[0].target.shape

        def write(out: Tensor) -> None:
            stack = (out.T if is_transposed else out)[None]
            for part in parts:
                _write_part(_view(family, part.target.place, stack)[0], part)

        read = partial(_read_blocks, parts, outputs, is_transposed=is_transposed)
        return Unpacked((shape[1], shape[0]) if is_transposed else (shape[0], shape[1]), dtype, write, read)

    return [matrix(number) for number in range(sources[0].target.shape[0])]


def _read_blocks(sources: list[_Source], outputs: _OutputsOf, *, is_transposed: bool = False) -> Blocks | None:
    """Return the numbers of a matrix as the file has them; None if our kernels cannot use them.

    Args:
        sources: the tensors of the file, or matrices of stacks, that have its outputs.
        outputs: see ``_outputs_of``.
        is_transposed: whether transformers' tensor has a row for each input.
    """
    parts: list[Blocks] = []
    places: list[Tensor] = []
    for source in sources:
        of_source, kind = outputs(source.target.place, source.target.shape, is_transposed), source.tensor.kind
        if of_source is None:
            return None
        # A copy, since torch needs writable memory.
        data = torch.from_numpy(np.array(source.data)).view(-1, kind.num_bytes)
        part = read_blocks(kind.name, data, len(of_source))
        if part is None:
            return None
        parts.append(part)
        places.append(of_source)
    joined, order = join_blocks(parts), torch.cat(places).argsort()
    return joined if torch.equal(order, torch.arange(len(order))) else joined.map(lambda rows: rows[order])


def _outputs_of(family: Family, place: Place, shape: tuple[int, ...], is_transposed: bool) -> Tensor | None:
    """Return the output of transformers' matrix for each row of the file's; None if more than rows is reordered.

    Args:
        shape: of a matrix, or of a stack, whose matrices have the same order.
        is_transposed: whether transformers' matrix has a row for each input.
    """
    *_, num_rows, num_columns = shape
    if place.view is None:
        return None if is_transposed else torch.arange(num_rows)
    rows = torch.arange(num_rows)[:, None].expand(num_rows, num_columns)
    columns = torch.arange(num_columns).expand(num_rows, num_columns)
    # One matrix stands for all of a stack.
    both = (columns, rows) if is_transposed else (rows, columns)
    views = [_view(family, place, each[None] if len(shape) == 3 else each) for each in both]
    outputs, inputs = (each.flatten(0, -2) for each in views)
    num_inputs = num_rows if is_transposed else num_columns
    if inputs.shape[-1] != num_inputs or not (outputs == outputs[:, :1]).all():
        return None
    # A copy, because a view would keep the numbers of all columns.
    return outputs[:, 0].clone() if (inputs == torch.arange(num_inputs)).all() else None


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
