"""The tensors of a folder's safetensors files by name, and tensors that are computed from them.

Both are read when transformers asks for them; computed ones a piece at a time. All formats here use one formula: a
weight is (value - zero point) x scale, in float32, rounded once to the model's dtype. A scale applies to a part of the
weight, which a grid determines; see ``Grid``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ....kernels.linear.blocks import BlockForm, Blocks
from ....shared.errors import ModelLoadError
from .headers import weight_files

# Weights in float32 at a time, per loading thread: 4 MiB, and a few times that for intermediate results.
_PIECE_ELEMENTS = 1 << 20
# Numbers of columns that may share a scale in a weight of the kernels.
_BLOCK_SIZES = (32, 16)
# Largest error of a scale or a minimum in float16.
_HALF_ERROR = 2**-9
# A piece begins at a boundary of packed words of up to 32 values.
_ROWS = 32
# Scale of each byte in the MX formats (E8M0: 2 ** (byte - 127)); 255 is NaN.
_E8M0 = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")])
# Values of four bits in the same formats (E2M1): sign, two bits of exponent, one of mantissa.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat((_E2M1, -_E2M1))


class StoredTensors:
    """The tensors of a folder. They are read only when requested; slices keep their file open.

    Raises:
        ModelLoadError: the folder has no such files, or an index that names missing ones.
        OSError, SafetensorError: a file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        files = [safe_open(path, framework="pt") for path in weight_files(folder)]
        self._slices: dict[str, Any] = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118  # no dictionary

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __contains__(self, name: str) -> bool:
        return name in self._slices

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype in safetensors' spelling: ``BF16``, ``F8_E4M3``, ``I32``."""
        return self._slices[name].get_dtype()

    def slice(self, name: str) -> Any:
        """Return an object that reads the tensor, or a part, when it is indexed."""
        return self._slices[name]

    def read(self, name: str) -> Tensor:
        return self._slices[name][...]


@dataclass(frozen=True)
class Unpacked:
    """Replaces a file's slice for transformers' loader: indexing with ``...`` returns the tensor.

    Args:
        write: fills a tensor of this shape and dtype.
        blocks: returns the numbers of the file; None if our kernels cannot use them. None for a format that has none.
        matrices: returns the matrices [O, I] of a stack, which have ``blocks``; None for other tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    write: Callable[[Tensor], None]
    blocks: Callable[[], Blocks | None] | None = None
    matrices: Callable[[], list[Unpacked]] | None = None

    def __getitem__(self, _whole: EllipsisType) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.write(tensor)
        return tensor


# Tensors that transformers loads by name: ``Unpacked``, or a slice of a file.
Readable = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """The scale of each weight of a matrix [O, I].

    Args:
        scales: [SO, SI] float32.
        zeros: the value that means zero, [SO, SI] float32; None for 0.
        rows: [O] the row of ``scales`` for a row of the weight.
        columns: [I] the column of ``scales`` for a column of the weight.
    """

    scales: Tensor
    zeros: Tensor | None
    rows: Tensor
    columns: Tensor

    def apply(self, values: Tensor, rows: slice) -> Tensor:
        """Convert ``values`` [R, I], float32, of the given ``rows`` of the weight, to the numbers that they
        represent.
        """
        scale_rows = self.rows[rows]
        if self.zeros is not None:
            values = values - self.zeros[scale_rows][:, self.columns]
        return values * self.scales[scale_rows][:, self.columns]

    def has_blocks(self, size: int) -> bool:
        """Return whether each block of ``size`` columns shares its scales."""
        blocks = self.columns.unflatten(0, (-1, size)) if len(self.columns) % size == 0 else None
        return blocks is not None and bool((blocks == blocks[:, :1]).all())

    def of_blocks(self, size: int) -> tuple[Tensor, Tensor]:
        """Return scales and zeros [O, I / size] of blocks of ``size`` columns."""
        zeros = torch.zeros_like(self.scales) if self.zeros is None else self.zeros
        scales, zeros = (each[self.rows][:, self.columns[::size]] for each in (self.scales, zeros))
        return scales, zeros


def make_grid(
    name: str, shape: tuple[int, int], scales: Tensor, zeros: Tensor | None, block: tuple[int, int] | None = None
) -> Grid:
    """Return the grid for ``scales`` of any form and a weight of ``shape``: per block, group or row, or one for all.

    Args:
        name: of the scales, for messages.
        block: rows and columns of the weight that share a scale, if the configuration says so.

    Raises:
        ModelLoadError: they do not fit.
    """
    num_rows, num_columns = shape
    grid = scales.float() if scales.dtype != torch.uint8 else _E8M0[scales.long()]
    if grid.numel() == 1:
        grid = grid.reshape(1, 1)
    elif grid.dim() == 1 and len(grid) == num_rows:
        grid = grid[:, None]
    steps = [
        _step(size, length, block and block[axis])
        for axis, (size, length) in enumerate(zip(shape, grid.shape, strict=False))
    ]
    if grid.dim() != 2 or 0 in steps:
        blocks_text = f" in blocks of {block[0]} x {block[1]}" if block else ""
        raise ModelLoadError(
            f"{name} is {list(scales.shape)}, which are no scales for a weight of {list(shape)}{blocks_text}; "
            "fetch the model again"
        )
    rows, columns = torch.arange(num_rows) // steps[0], torch.arange(num_columns) // steps[1]
    return Grid(grid, None if zeros is None else zeros.float().reshape(grid.shape), rows, columns)


def _step(size: int, num_scales: int, block: int | None) -> int:
    """Return how many of ``size`` rows or columns share a scale; 0 if the number of scales does not fit."""
    if block is not None and num_scales == -(-size // block):
        return block
    return {1: size, size: 1}.get(num_scales, 0)


def pieces(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Yield the rows of a matrix in parts that are small in float32."""
    step = max(_ROWS, _PIECE_ELEMENTS // max(num_columns, 1) // _ROWS * _ROWS)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def write_scaled(out: Tensor, values: Callable[[slice], Tensor], grid: Grid) -> None:
    """Fill ``out`` [O, I] from ``values``, which returns some of its rows, of any dtype."""
    for rows in pieces(*out.shape):
        out[rows] = grid.apply(values(rows).float(), rows)


def unpacked_integers(
    shape: tuple[int, int],
    dtype: torch.dtype,
    read: Callable[[], Callable[[slice], Tensor]],
    grid: Grid,
    bits: int,
    lowest: int = 0,
) -> Unpacked:
    """Return the weight [O, I] of integers of ``bits`` bits from ``lowest`` on.

    Args:
        read: opens the numbers; the result returns some rows of them.
    """

    def write(out: Tensor) -> None:
        write_scaled(out, read(), grid)

    def blocks() -> Blocks | None:
        return _read_blocks(shape, read(), grid, bits, lowest)

    return Unpacked(shape, dtype, write, blocks)


def _read_blocks(
    shape: tuple[int, int], values: Callable[[slice], Tensor], grid: Grid, bits: int, lowest: int
) -> Blocks | None:
    """Return a weight for the kernels, as ``unpacked_integers``; None if they cannot use its scales."""
    size = next((size for size in _BLOCK_SIZES if grid.has_blocks(size)), None)
    if size is None:
        return None
    scales, zeros = grid.of_blocks(size)
    middle = lowest + (1 << (bits - 1))
    form = BlockForm.smallest(bits, size, has_minimums=not (zeros == middle).all())
    first = lowest if form.has_minimums else middle - form.zero
    minimums = (first - zeros) * scales if form.has_minimums else None
    if not all(each is None or _fits_half(each) for each in (scales, minimums)):
        return None
    numbers = torch.empty(shape, dtype=torch.uint8)
    for rows in pieces(*shape):
        numbers[rows] = values(rows) - first
    return Blocks(form, numbers, scales.half(), None if minimums is None else minimums.half())


def _fits_half(values: Tensor) -> bool:
    """Return whether float16 represents ``values``, but for a small part of the larger ones."""
    return torch.allclose(values.half().float(), values, _HALF_ERROR, _HALF_ERROR * values.abs().mean().item())


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned numbers from ``words`` [..., W] int32, the lowest bits first: [..., W * 32 / bits] int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Unpack numbers from ``packed`` [..., N] uint8, the lower four bits first: [..., 2 N] float32."""
    return _E2M1[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()]
