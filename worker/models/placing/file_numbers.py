"""Weights whose numbers in a quantized file our kernels use as they are.

Such a weight knows its sources in the file. A tensor that replaces it does not, so a part of it, or a changed copy, is
packed like any other weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ....kernels.huge_pages import Arena
from ....kernels.linear import PackedWeight, can_multiply_blocks, pack_blocks
from ..formats.tensors import Readable, Unpacked

_ATTRIBUTE, _STACK_ATTRIBUTE = "file_sources", "file_sources_of_matrices"
# Names of an expert's tensors by the stack that has their outputs concatenated, and of the part that has the experts.
_EXPERT_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
# Names of stacks in Granite's files by those in transformers' module.
_RENAMED_STACKS = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
_EXPERT_FOLDERS = ("mlp", "block_sparse_moe")


def supported_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return bfloat16 instead of float16, in which our kernels do not compute, if they can be used."""
    return torch.bfloat16 if dtype is torch.float16 and can_multiply_blocks(torch.bfloat16) else dtype


def mark_weights(module: nn.Module, tensors: Readable) -> None:
    """Let the weights of ``module`` know their sources in ``tensors``, which have the same names.

    A stack of the matrices of all experts knows them, too, also if transformers joins it from tensors of each expert.
    """
    for name, weight in module.named_parameters():
        source = tensors.get(name)
        if _fits(source, weight.dtype):
            _mark(weight, [source])
        elif (whole := _stack_source(name, weight, tensors)) is not None:
            _mark_stack(weight, whole)
        elif weight.dim() == 3 and (stack := _sources_of_experts(name, weight, tensors)):
            setattr(weight, _STACK_ATTRIBUTE, stack)


def has_matrices(source: Any) -> TypeGuard[Unpacked]:
    """Return whether ``source`` is a stack of matrices whose numbers our kernels can use."""
    return isinstance(source, Unpacked) and source.matrices is not None


def matrices_of(stack: Tensor, *, is_transposed: bool) -> list[Tensor]:
    """Return the matrices ``[O, I]`` of a stack, which know their sources if it does.

    Args:
        is_transposed: the stack has them as ``[I, O]``.
    """
    sources = getattr(stack, _STACK_ATTRIBUTE, None)
    matrices = [each.T if is_transposed else each for each in stack.detach()]
    return matrices if sources is None else [_mark(*both) for both in zip(matrices, sources, strict=True)]


def _stack_source(name: str, stack: Tensor, tensors: Readable) -> Unpacked | None:
    """Return the source of ``stack`` in one tensor, which transformers may have renamed; None without one."""
    experts, _, kind = name.rpartition(".")
    for each in (name, f"{experts.removesuffix('.experts')}.{_RENAMED_STACKS.get(kind)}"):
        source = tensors.get(each)
        if has_matrices(source) and source.shape == stack.shape and source.dtype == stack.dtype:
            return source
    return None


def _sources_of_experts(name: str, stack: Tensor, tensors: Readable) -> list[list[Unpacked]] | None:
    """Return the sources of each matrix of ``stack``; None if it is not what the tensors of an expert make up."""
    experts, _, kind = name.rpartition(".")
    for folder, parts in itertools.product(_EXPERT_FOLDERS, _EXPERT_PARTS.get(kind, ())):
        prefix = experts.replace(".mlp.", f".{folder}.")
        sources: list[list[Any]] = [
            [tensors.get(f"{prefix}.{number}.{part}.weight") for part in parts] for number in range(len(stack))
        ]
        if not all(_fits(each, stack.dtype) for of_expert in sources for each in of_expert):
            continue
        # The order of the parts is known by the content.
        return sources if torch.equal(torch.cat([each[...] for each in sources[0]]), stack[0]) else None
    return None


def _fits(source: Any, dtype: torch.dtype) -> TypeGuard[Unpacked]:
    return isinstance(source, Unpacked) and source.blocks is not None and source.dtype == dtype


def empty_weight(source: Unpacked) -> nn.Parameter:
    """Return a weight, or a stack of weights, without content that knows its source."""
    weight = torch.empty(source.shape, dtype=source.dtype, device="meta")
    if has_matrices(source):
        return _mark_stack(nn.Parameter(weight, requires_grad=False), source)
    return _mark(weight, [source])


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


def pack_file_numbers(weights: Sequence[Tensor], bias: Tensor | None, arena: Arena) -> PackedWeight | None:
    """Pack the numbers of the file for ``weights``, whose outputs are concatenated, and their ``bias``.

    Returns None if a weight has no sources, or no kernel supports them.
    """
    sources = [_sources_of(weight) for weight in weights]
    if not all(sources) or not can_multiply_blocks(weights[0].dtype):
        return None
    parts = [source.blocks() for each in sources for source in each if source.blocks is not None]
    blocks = [part for part in parts if part is not None]
    return pack_blocks(blocks, bias, arena) if len(blocks) == sum(map(len, sources)) else None


def _mark_stack(stack: nn.Parameter, source: Unpacked) -> nn.Parameter:
    assert source.matrices is not None
    setattr(stack, _STACK_ATTRIBUTE, [[matrix] for matrix in source.matrices()])
    return stack


def _sources_of(weight: Tensor) -> list[Unpacked]:
    return getattr(weight, _ATTRIBUTE, [])


def _mark(weight: Tensor, sources: Iterable[Unpacked]) -> nn.Parameter:
    parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    setattr(parameter, _ATTRIBUTE, list(sources))
    return parameter
