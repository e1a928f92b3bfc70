"""The layouts of adapters: for the compiled library, for Triton, and for plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.decoder import LayerAdapters
from ....kernels.lora import lora_expand, lora_shrink
from ....kernels.lora.packed import LoraPart, PackedLora, ProductStruct, add_packed_lora, pack_lora
from .slots import zeros_like_outputs
from .targets import AdapterTarget


class PackedLayout:
    """Layout for the compiled library on the CPU: each adapter keeps its rank, and a slot is an address.

    Args:
        products: the index of each target among ``num_products``; adapters add nothing to the others.
    """

    def __init__(self, products: Sequence[int], num_slots: int, num_products: int) -> None:
        self._num_slots = num_slots
        self._all = (ProductStruct * (num_products * num_slots))()
        size, of_target = ctypes.sizeof(ProductStruct) * num_slots, ProductStruct * num_slots
        self._products_of_targets = [of_target.from_buffer(self._all, product * size) for product in products]
        # The structs hold only addresses, so the tensors must be referenced here.
        self._referenced: dict[tuple[int, int], PackedLora | None] = {}

    @property
    def of_layers(self) -> LayerAdapters:
        """The adapters in the form of a decoder with these products."""
        return LayerAdapters(self._all, self._num_slots)

    def prepare(self, target: AdapterTarget, parts: Sequence[LoraPart]) -> PackedLora:
        return pack_lora(parts)

    def put(self, place: int, slot: int, prepared: PackedLora | None) -> None:
        self._products_of_targets[place][slot] = ProductStruct() if prepared is None else prepared.struct()
        self._referenced[place, slot] = prepared

    def add(self, place: int, inputs: Tensor, token_lora: Tensor, out: Tensor) -> None:
        add_packed_lora(inputs, self._products_of_targets[place], token_lora, out)

    def try_out(self, target: AdapterTarget, prepared: PackedLora, inputs: Tensor) -> Tensor:
        out = zeros_like_outputs(target, inputs)
        alone = (ProductStruct * 1)(prepared.struct())
        add_packed_lora(inputs, alone, torch.zeros(len(inputs), dtype=torch.int64), out)
        return out


class PlainLayout:
    """Layout for a CPU without the compiled library: plain torch, one adapter after the other."""

    def __init__(self, targets: Sequence[AdapterTarget], num_slots: int) -> None:
        self._contents: list[list[Sequence[LoraPart]]] = [[() for _ in range(num_slots)] for _ in targets]

    def prepare(self, target: AdapterTarget, parts: Sequence[LoraPart]) -> Sequence[LoraPart]:
        return parts

    def put(self, place: int, slot: int, prepared: Sequence[LoraPart] | None) -> None:
        self._contents[place][slot] = prepared or ()

    def add(self, place: int, inputs: Tensor, token_lora: Tensor, out: Tensor) -> None:
        for slot, parts in enumerate(self._contents[place]):
            if parts and len(rows := torch.where(token_lora == slot)[0]):
                out[rows] = _add_parts(parts, inputs[rows], out[rows])

    def try_out(self, target: AdapterTarget, prepared: Sequence[LoraPart], inputs: Tensor) -> Tensor:
        return _add_parts(prepared, inputs, zeros_like_outputs(target, inputs))


def _add_parts(parts: Sequence[LoraPart], inputs: Tensor, out: Tensor) -> Tensor:
    for part in parts:
        out[:, part.first_output : part.first_output + len(part.b)] += (inputs @ part.a.T) @ part.b.T
    return out


@dataclass(frozen=True)
class _Stack:
    """Matrices of all slots at one target, at fixed addresses: ``a [NL, parts * R, K]``, and ``b [NL, N, R]`` per
    part.
    """

    a: Tensor
    b: tuple[Tensor, ...]


class StackedLayout:
    """Layout for Triton: matrices of all slots in one tensor, each padded to the largest rank."""

    def __init__(self, targets: Sequence[AdapterTarget], num_slots: int, max_rank: int, like: Tensor) -> None:
        self._max_rank = max_rank
        self._targets = targets
        self._like = like
        self._stacks = [self._empty(target, num_slots) for target in targets]

    def prepare(self, target: AdapterTarget, parts: Sequence[LoraPart]) -> _Stack:
        """Return the matrices for one slot, in host memory that the device can read directly."""
        stack = self._empty(target, 1, "cpu")
        for part in parts:
            index = next(i for i, each in enumerate(target.parts) if each.start == part.first_output)
            rank, first = len(part.a), index * self._max_rank
            stack.a[0, first : first + rank] = part.a
            stack.b[index][0, :, :rank] = part.b
        if self._like.device.type != "cuda":
            return stack
        return _Stack(stack.a.pin_memory(), tuple(b.pin_memory() for b in stack.b))

    def put(self, place: int, slot: int, prepared: _Stack | None) -> None:
        stack = self._stacks[place]
        for index, matrices in enumerate((stack.a, *stack.b)):
            if prepared is None:
                matrices[slot].zero_()
            else:
                matrices[slot].copy_((prepared.a, *prepared.b)[index][0], non_blocking=True)

    def add(self, place: int, inputs: Tensor, token_lora: Tensor, out: Tensor) -> None:
        self._add(self._targets[place], self._stacks[place], inputs, token_lora, out)

    def try_out(self, target: AdapterTarget, prepared: _Stack, inputs: Tensor) -> Tensor:
        out, device = zeros_like_outputs(target, inputs), inputs.device
        alone = _Stack(prepared.a.to(device), tuple(b.to(device) for b in prepared.b))
        self._add(target, alone, inputs, torch.zeros(len(inputs), dtype=torch.int64, device=device), out)
        return out

    def _add(self, target: AdapterTarget, stack: _Stack, inputs: Tensor, token_lora: Tensor, out: Tensor) -> None:
        between = lora_shrink(inputs, stack.a, token_lora)
        for index, part in enumerate(target.parts):
            columns = between[:, index * self._max_rank : (index + 1) * self._max_rank]
            lora_expand(columns, stack.b[index], token_lora, out[:, part.start : part.end])

    def _empty(self, target: AdapterTarget, num_slots: int, device: str | None = None) -> _Stack:
        like = self._like if device is None else self._like.to(device)
        rank, num_inputs = self._max_rank, target.linear.in_features
        return _Stack(
            like.new_zeros(num_slots, len(target.parts) * rank, num_inputs),
            tuple(like.new_zeros(num_slots, part.end - part.start, rank) for part in target.parts),
        )
