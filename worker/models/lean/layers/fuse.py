"""Fuse the weights of several linear layers with the same input into one layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...placing.file_numbers import contents_of, mark_joined


def fuse_linear(parts: Sequence[nn.Linear]) -> nn.Linear:
    """Return one layer whose output is the concatenated output of ``parts``.

    The parts remain usable, as views of the new layer. So no weight is stored twice, and a model that turns out not to
    be lean can still be computed by its own code.
    """
    if len(parts) == 1:
        return parts[0]
    has_bias = any(part.bias is not None for part in parts)
    weights = [part.weight for part in parts]
    weight = mark_joined(concatenate(contents_of(weights)), weights)
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
    fused.weight = weight
    if has_bias:
        fused.bias = nn.Parameter(concatenate([_bias(part) for part in parts]), requires_grad=False)
    start = 0
    for part in parts:
        end = start + part.out_features
        part.weight = nn.Parameter(weight.detach()[start:end], requires_grad=False)
        if part.bias is not None:
            part.bias = nn.Parameter(fused.bias.detach()[start:end], requires_grad=False)
        start = end
    return fused


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension. For tensors without content, ``torch.cat`` would import ``torch._dynamo``,
    which takes 2 s.
    """
    sizes = [len(tensor) for tensor in tensors]
    whole = tensors[0].new_empty(sum(sizes), *tensors[0].shape[1:])
    for part, tensor in zip(whole.split(sizes), tensors, strict=True):
        part.copy_(tensor)
    return whole


def _bias(part: nn.Linear) -> Tensor:
    return part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach()
