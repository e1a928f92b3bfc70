"""Slots for adapters: each holds one adapter for all layers of the model, in the layout of the code that computes it.

An adapter is prepared once, by any thread. A slot changes between two steps: ``assign`` only records the new content,
and ``flush`` copies it when nothing computes. There are layouts for the compiled library, for Triton and for plain
torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ....kernels.decoder import LayerAdapters
from ....kernels.lora import lora_expand, lora_shrink
from ....kernels.lora.packed import LoraPart, PackedLora, ProductStruct, add_packed_lora, pack_lora
from ..parallel.shares import ModelShares
from ..placing.device import return_free_memory
from .files import LoadedAdapter
from .peft_folder import LayerMatrices
from .targets import AdapterTarget, layers_of

# An adapter's matrices by the index of their target, in the layout of the slots.
Prepared = Mapping[int, Any]


class SlotLayout(Protocol):
    """Memory layout of adapters, and the computation with them."""

    def prepare(self, target: AdapterTarget, parts: Sequence[LoraPart]) -> Any:
        """Lay out the part of one adapter at ``target``."""
        ...

    def put(self, place: int, slot: int, prepared: Any | None) -> None:
        """Copy the prepared part into a slot of the target at ``place``; None empties the slot."""
        ...

    def free_slots(self) -> None:
        """Release the memory of all slots."""
        ...

    def allocate_slots(self) -> None:
        """Allocate the slots again, empty."""
        ...

    def add(self, place: int, inputs: Tensor, token_lora: Tensor, out: Tensor) -> None:
        """Add the adapters' outputs for ``inputs [T, K]`` to ``out [T, N]``, in place."""
        ...

    def try_out(self, target: AdapterTarget, prepared: Any, inputs: Tensor) -> Tensor:
        """Return the addition ``[T, N]`` of one adapter at ``target`` for ``inputs [T, K]``; for any thread."""
        ...


class AdapterSlots:
    """``num_slots`` slots of a model with these ``targets``. A ``Sleepable``: adapters stay in host memory meanwhile.

    Attributes:
        are_released: whether they sleep.
        layers: numbers of inputs and outputs of the layers that can be adapted, by name, whole also if ranks share
            them.
        max_rank: largest rank of an adapter.
        dtype, device: of the computation.
    """

    def __init__(
        self,
        layout: SlotLayout,
        targets: list[AdapterTarget],
        num_slots: int,
        max_rank: int,
        like: Tensor,
        shares: ModelShares | None = None,
    ) -> None:
        self._layout = layout
        self._targets = targets
        self._place_of = {part.layer: (place, part) for place, target in enumerate(targets) for part in target.parts}
        self._pending: dict[int, Prepared] = {}
        # Content of each slot.
        self._contents: list[Prepared] = [{} for _ in range(num_slots)]
        self.are_released = False
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._shares = shares
        own_layers = layers_of(targets)
        self.layers = own_layers if shares is None else shares.sizes_with(own_layers)
        self.dtype, self.device = like.dtype, like.device

    def part_of(self, matrices: Mapping[str, LayerMatrices]) -> Mapping[str, LayerMatrices]:
        """Return this rank's part of ``matrices`` of ``layers``, by its own names of them.

        Where a rank has a part of the outputs, it needs those rows of ``b``. Where it has a part of the inputs, it
        needs those columns of ``a``, and the sum over the ranks adds up the products.
        """
        if self._shares is None:
            return matrices
        parts = {}
        for own, share in self._shares.own.items():
            if (pair := matrices.get(share.name)) is not None:
                a, b = pair.a[:, share.inputs].contiguous(), pair.b[share.outputs].contiguous()
                parts[own] = LayerMatrices(a, b)
        return parts

    def prepare(self, matrices: Mapping[str, LayerMatrices]) -> Prepared:
        """Lay out an adapter; may run during a step."""
        return {place: self._layout.prepare(self._targets[place], parts) for place, parts in self._by_target(matrices)}

    def try_out(self, prepared: Prepared, layer: str, inputs: Tensor) -> Tensor:
        """Return the addition of a prepared adapter to the outputs of ``layer`` for ``inputs [T, K]``; may run during a
        step.
        """
        place, part = self._place_of[layer]
        return self._layout.try_out(self._targets[place], prepared[place], inputs)[:, part.start : part.end]

    def share_adapter(self, folder: Path, digest: str) -> None:
        """Let other ranks read the adapter in ``folder``, too, unless they have; here there are none."""

    def keep_adapter(self, loaded: LoadedAdapter) -> None:
        """Have an adapter on all ranks, now that it is in memory. Raises as ``share_adapter``."""
        # The thread that read it has shared it; the same adapter under another name may have been dropped since.
        self.share_adapter(loaded.folder, loaded.digest)

    def drop_adapter(self, digest: str) -> None:
        """Let other ranks forget an adapter."""

    def assign(self, slot: int, prepared: Prepared, digest: str = "") -> None:
        """Let the slot hold ``prepared``, the adapter ``digest``, from the next ``flush`` on."""
        self._pending[slot] = prepared

    def flush(self) -> None:
        """Copy assigned adapters into their slots. Call it when nothing computes."""
        while self._pending:
            slot, prepared = next(iter(self._pending.items()))
            for place in range(len(self._targets)):
                if place in prepared or place in self._contents[slot]:
                    self._layout.put(place, slot, prepared.get(place))
            self._contents[slot] = prepared
            del self._pending[slot]

    def release(self, level: int) -> None:
        """Release the memory of the slots, at any level."""
        self._pending = {slot: prepared for slot, prepared in enumerate(self._contents) if prepared} | self._pending
        self._contents = [{} for _ in self._contents]
        self._layout.free_slots()
        self.are_released = True

    def restore(self) -> None:
        """Allocate the slots again; the next ``flush`` copies their adapters."""
        self._layout.allocate_slots()
        self.are_released = False

    def _by_target(self, matrices: Mapping[str, LayerMatrices]) -> list[tuple[int, list[LoraPart]]]:
        parts: dict[int, list[LoraPart]] = {}
        for layer, pair in matrices.items():
            place, part = self._place_of[layer]
            parts.setdefault(place, []).append(LoraPart(part.start, pair.a, pair.b))
        return [(place, sorted(group, key=lambda part: part.first_output)) for place, group in sorted(parts.items())]


def zeros_like_outputs(target: AdapterTarget, inputs: Tensor) -> Tensor:
    """Return zeros ``[T, N]`` in the shape of the target's outputs."""
    return torch.zeros(len(inputs), target.parts[-1].end, dtype=inputs.dtype, device=inputs.device)


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

    def free_slots(self) -> None:
        ctypes.memset(self._all, 0, ctypes.sizeof(self._all))
        self._referenced.clear()

    def allocate_slots(self) -> None:
        """Do nothing, since empty slots have no memory."""

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

    def free_slots(self) -> None:
        self._contents = [[() for _ in slots] for slots in self._contents]

    def allocate_slots(self) -> None:
        """Do nothing, since empty slots have no memory."""

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
        self._num_slots = num_slots
        self.allocate_slots()

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

    def free_slots(self) -> None:
        self._stacks = []
        return_free_memory()

    def allocate_slots(self) -> None:
        self._stacks = [self._empty(target, self._num_slots) for target in self._targets]

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
