"""Weights of which each rank has a piece: how they are written down, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ....shared.errors import ModelLoadError
from .layout import ParallelLayout


class Piece(NamedTuple):
    """What one rank has of a weight.

    ``num_parts`` says how many things lie behind each other in the weight, of each of which it is a piece: gate and up
    projection of fused experts are two.
    """

    tensor: Tensor
    num_parts: int = 1


def write_pieces(path: Path, pieces: Mapping[str, Piece]) -> None:
    """Write ``pieces``, by the names of weights, as a safetensors file.

    Raises:
        OSError, safetensors.SafetensorError: it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, piece in pieces.items():
        tensor = piece.tensor.detach().cpu().contiguous()
        # The format has each byte once, and a head may be a part of the embeddings.
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    save_file(tensors, path, {name: str(piece.num_parts) for name, piece in pieces.items() if piece.num_parts > 1})


def read_pieces(paths: Sequence[Path], layout: ParallelLayout, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Put together what the ranks of ``layout`` have written to ``paths``, in their order.

    Args:
        shapes: of the whole weights. Those of which no rank has anything are left out.

    Returns:
        What is whole in a file looks at it: the files may be unlinked, but not changed.

    Raises:
        ModelLoadError: the pieces of a weight do not make one of its shape.
    """
    with ExitStack() as stack:
        files: list[Any] = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        names = [set(file.keys()) for file in files]
        whole: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            # Several stages may have the same norm; those of one stage have pieces of one weight.
            stages = ([rank for rank in ranks if name in names[rank]] for ranks in layout.tensor_groups)
            if owners := next(filter(None, stages), None):
                num_parts = int((files[owners[0]].metadata() or {}).get(name, "1"))
                whole[name] = join([files[rank].get_tensor(name) for rank in owners], shape, name, num_parts)
        return whole


def join(pieces: Sequence[Tensor], shape: torch.Size, name: str, num_parts: int = 1) -> Tensor:
    """Return the weight of ``shape`` that ``pieces`` are of, in the order of their ranks.

    Along one dimension they follow each other; ranks next to each other may have the same piece, and all the whole.

    Raises:
        ModelLoadError: they make none; names it.
    """
    first = pieces[0]
    if first.shape == shape:
        return first
    differing = [dim for dim in range(len(shape)) if dim >= first.ndim or first.shape[dim] != shape[dim]]
    if first.ndim == len(shape) and len(differing) == 1:
        dim = differing[0]
        num_copies = max(1, sum(piece.shape[dim] for piece in pieces) // shape[dim])
        parts = [piece.chunk(num_parts, dim) for piece in pieces[::num_copies]]
        joined = torch.cat([part[number] for number in range(num_parts) for part in parts], dim)
        if joined.shape == shape:
            return joined
    told = ", ".join(str(tuple(piece.shape)) for piece in pieces)
    raise ModelLoadError(f"{name} is {tuple(shape)} in the model, and the ranks have {told} of it")
