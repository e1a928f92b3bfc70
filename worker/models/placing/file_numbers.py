"""Weights whose numbers in a quantized file our kernels use as they are.

Such a weight knows its sources in the file. A tensor that replaces it does not, so a part of it, or a changed copy, is
packed like any other weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ....kernels.huge_pages import Arena
from ....kernels.linear import PackedWeight, can_multiply_blocks, pack_blocks
from ..formats.tensors import Readable, Unpacked

_ATTRIBUTE = "file_sources"


def supported_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return bfloat16 instead of float16, in which our kernels do not compute, if they can be used."""
    return torch.bfloat16 if dtype is torch.float16 and can_multiply_blocks(torch.bfloat16) else dtype


def mark_weights(module: nn.Module, tensors: Readable) -> None:
    """Let the weights of ``module`` know their sources in ``tensors``, which have the same names."""
    for name, weight in module.named_parameters():
        source = tensors.get(name)
        if isinstance(source, Unpacked) and source.blocks is not None and weight.dtype == source.dtype:
            _mark(weight, [source])


def empty_weight(source: Unpacked) -> nn.Parameter:
    """Return a weight without content that knows its source."""
    return _mark(torch.empty(source.shape, dtype=source.dtype, device="meta"), [source])


def contents_of(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the contents of ``weights``. They need none if all of them know their sources."""
    has_sources = all(_sources_of(weight) for weight in weights)
    return [weight.detach() if has_sources else with_content(weight) for weight in weights]


def mark_joined(whole: Tensor, weights: Sequence[Tensor]) -> nn.Parameter:
    """Return ``whole``, the concatenated ``weights``, as a parameter. If all of them know their sources, so does it."""
    sources = [_sources_of(weight) for weight in weights]
    return _mark(whole, [each for part in sources for each in part] if all(sources) else [])


def with_content(weight: Tensor) -> Tensor:
    """Return ``weight``, or its content from its sources if it has none."""
    sources = _sources_of(weight)
    return torch.cat([source[...] for source in sources]) if weight.is_meta and sources else weight.detach()


def pack_file_numbers(plain: nn.Linear, arena: Arena) -> PackedWeight | None:
    """Pack the numbers of the file for ``plain``; return None if its weight has no sources, or no kernel takes them."""
    sources = _sources_of(plain.weight)
    if not sources or not can_multiply_blocks(plain.weight.dtype):
        return None
    parts = [source.blocks() for source in sources if source.blocks is not None]
    blocks = [part for part in parts if part is not None]
    return pack_blocks(blocks, plain.bias, arena) if len(blocks) == len(sources) else None


def _sources_of(weight: Tensor) -> list[Unpacked]:
    return getattr(weight, _ATTRIBUTE, [])


def _mark(weight: Tensor, sources: Iterable[Unpacked]) -> nn.Parameter:
    parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    setattr(parameter, _ATTRIBUTE, list(sources))
    return parameter
