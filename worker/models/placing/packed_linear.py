"""Linear layers whose weights are laid out once for the processor.

In float32 and bfloat16, if the compiled kernels are available, by our own kernel; else by oneDNN. GFLOP/s of one core
with the weight in its cache, own / oneDNN, in bfloat16: 72 / 33 to 62 for one token, 220 / 148 to 204 for eight, 230 /
185 to 223 for 64, which is the limit of the instruction. oneDNN, all linear layers of a 135M model: 17 ms packed and 27
plain for one token, 18 and 33 for eight, 70 and 86 for 64; float32 gains as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ....kernels.huge_pages import Arena
from ....kernels.linear import (
    PANEL,
    PackedWeight,
    can_pack,
    can_quantize,
    can_quantize_to_nibbles,
    join_weights,
    linear,
    pack_bias,
    pack_weight,
    quantize_weight,
    quantize_weight_to_nibbles,
    split_weight,
    unpack_weight,
)
from .file_numbers import pack_file_numbers, with_content

Packing = Callable[[Tensor, Tensor | None, Arena], PackedWeight]

# Smaller layers are gates and routers: they take no time, and rounding them would send tokens to other experts.
MIN_QUANTIZED_OUTPUTS = 64
# Layers that "int4-mixed" keeps in bytes, by a part of their path in lower case: the output layer, and the projections
# out of attention and feed-forward parts, in lean networks and in those of transformers. Their rounding costs most.
_SENSITIVE_LAYERS = frozenset(("lm_head", "o_proj", "out_proj", "down_proj", "down", "output", "wo", "fc2"))
# oneDNN is slower on small layers: 0.5 and 0.2 ms for all of a 1.3M model's.
_MIN_ONEDNN_ELEMENTS = 200_000
# oneDNN's layout is made for this number; a layout for 1 token is slow for many, this one is good for both.
_EXPECTED_TOKENS = 64


class PackedLinear(nn.Module):
    """Computes a linear layer with a packed copy of its weight, which is a plain tensor of this module."""

    _packed: Tensor
    _bias: Tensor | None
    in_features: int
    out_features: int

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    @property
    def weight(self) -> Tensor:
        """A copy in the plain layout, exact unless quantized: the code of some models computes with it."""
        raise NotImplementedError


class OwnPackedLinear(PackedLinear):
    """A linear layer by our kernel. Its tensors are attributes of the module, where sleeping weights are searched
    for.
    """

    def __init__(self, plain: nn.Linear, weight: PackedWeight) -> None:
        super().__init__()
        self._packed, self._packed_bias = weight.packed, weight.bias
        self._scales, self._offsets = weight.scales, weight.offsets
        self._bias = None if plain.bias is None else plain.bias.detach()
        self._dtype = plain.weight.dtype
        self.in_features, self.out_features = plain.in_features, plain.out_features

    @property
    def weight(self) -> Tensor:
        return unpack_weight(self.packed_weight).to(self._dtype)

    @property
    def packed_weight(self) -> PackedWeight:
        """The weight in the form of the kernels."""
        return PackedWeight(
            packed=self._packed,
            bias=self._packed_bias,
            num_inputs=self.in_features,
            num_outputs=self.out_features,
            scales=self._scales,
            offsets=self._offsets,
        )

    @property
    def has_file_numbers(self) -> bool:
        """Whether the weight has the numbers of a quantized file."""
        return self.packed_weight.blocks is not None

    def move(self, packed: Tensor) -> None:
        """Use ``packed``, which has the same content, as the packed weight."""
        self._packed = packed

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.packed_weight)


class OneDnnLinear(PackedLinear):
    """A linear layer by oneDNN."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), _EXPECTED_TOKENS)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self._bias = None if plain.bias is None else plain.bias.detach()

    @property
    def weight(self) -> Tensor:
        return self._packed.to_dense()

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")


def pack_linear_layers(model: nn.Module, quantization: str | None = None, arena: Arena | None = None) -> int:
    """Replace the linear layers of ``model``, on the CPU, by packed ones where that is faster; return their number.

    Args:
        quantization: "int8" to store weights in bytes where possible; "int4" to store the large ones in four bits,
            "int4-mixed" the large ones that are not sensitive; None for the numbers of a quantized file as they are,
            and for other weights in their dtype.
        arena: memory for the packed weights; None for a new one.
    """
    return replace_linear_layers(model, partial(_pack, quantization=quantization, arena=arena or Arena()))


def replace_linear_layers(model: nn.Module, make: Callable[[str, nn.Linear], nn.Module | None]) -> int:
    """Replace each linear layer by the result of ``make`` for its path and itself, unless that is None; return their
    number.

    Layers whose ``forward`` was replaced, as transformers does for ranks that share them, stay.
    """
    num_replaced = 0
    for path, plain in linear_layers_of(model):
        replacement = make(path, plain)
        if replacement is not None:
            model.set_submodule(path, replacement)
            num_replaced += 1
    return num_replaced


def has_file_numbers(model: nn.Module) -> bool:
    """Return whether linear layers of ``model`` use the numbers of a quantized file as they are."""
    return any(isinstance(each, OwnPackedLinear) and each.has_file_numbers for each in model.modules())


def linear_layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the paths of the linear layers that may be replaced, and the layers. They may be replaced meanwhile."""
    for parent, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and "forward" not in vars(child):
                yield f"{parent}.{name}" if parent else name, child


def pack_adjacent(
    layers: Mapping[str, nn.Linear], quantization: str | None, arena: Arena
) -> list[OwnPackedLinear] | None:
    """Pack layers of one input, by path, so that ``concatenate_outputs`` needs no copy; None if that is impossible."""
    plain = list(layers.values())
    if any(each.out_features % PANEL for each in plain[:-1]):
        return None
    weights = [each.weight.detach() if quantization else each.weight for each in plain]
    whole = pack_file_numbers(weights, None, arena)
    if whole is None:
        pack, *others = {_packing_of(path, each, quantization) for path, each in layers.items()}
        if pack is None or others:
            return None
        whole = pack(torch.cat([each.detach() for each in weights]), None, arena)
    pieces = split_weight(whole, [each.out_features for each in plain])
    packed_weights = [replace(piece, bias=pack_bias(each.bias)) for each, piece in zip(plain, pieces, strict=True)]
    return [OwnPackedLinear(*both) for both in zip(plain, packed_weights, strict=True)]


def concatenate_outputs(linears: Sequence[OwnPackedLinear]) -> PackedWeight:
    """Return one weight that computes the outputs of all layers of one input. Their weights become parts of it."""
    joined = join_weights([each.packed_weight for each in linears])
    for each, piece in zip(linears, split_weight(joined, [each.out_features for each in linears]), strict=True):
        each.move(piece.packed)
    return joined


def _pack(path: str, plain: nn.Linear, quantization: str | None, arena: Arena) -> PackedLinear | None:
    file_numbers = pack_file_numbers([plain.weight], plain.bias, arena) if quantization is None else None
    if file_numbers is not None:
        return OwnPackedLinear(plain, file_numbers)
    if plain.weight.is_meta:
        plain.weight = nn.Parameter(with_content(plain.weight), requires_grad=False)
    pack = _packing_of(path, plain, quantization)
    if pack is not None:
        return OwnPackedLinear(plain, pack(plain.weight, plain.bias, arena))
    return OneDnnLinear(plain) if _suits_onednn(plain.weight) else None


def takes_four_bits(path: str, plain: nn.Linear, quantization: str | None) -> bool:
    """Return whether ``plain``, which has the ``path`` in its model, is packed in four bits."""
    if plain.out_features < MIN_QUANTIZED_OUTPUTS or not can_quantize_to_nibbles(plain.weight):
        return False
    is_sensitive = not _SENSITIVE_LAYERS.isdisjoint(path.lower().split("."))
    return quantization == "int4" or (quantization == "int4-mixed" and not is_sensitive)


def pack_in_four_bits(plain: nn.Linear, arena: Arena, feedback: Tensor | None) -> OwnPackedLinear:
    """Pack ``plain`` in four bits, with the ``feedback`` of ``quantize_weight_to_nibbles``."""
    return OwnPackedLinear(plain, quantize_weight_to_nibbles(plain.weight, plain.bias, arena, feedback))


def _packing_of(path: str, plain: nn.Linear, quantization: str | None) -> Packing | None:
    """Return the function that packs the weight for our kernel; None if the kernel does not support it."""
    if takes_four_bits(path, plain, quantization):
        return quantize_weight_to_nibbles
    if quantization is not None and can_quantize(plain.weight):
        return quantize_weight
    return pack_weight if can_pack(plain.weight) else None


def _suits_onednn(weight: Tensor) -> bool:
    if weight.numel() < _MIN_ONEDNN_ELEMENTS or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return weight.dtype == torch.float32
