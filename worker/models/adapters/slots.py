"""Slots for adapters: each holds one adapter for all layers of the model.

An adapter is prepared once, by any thread. A slot changes between two steps: ``assign`` only records the new content,
and ``flush`` copies it when nothing computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ....kernels.lora.packed import LoraPart
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

    def add(self, place: int, inputs: Tensor, token_lora: Tensor, out: Tensor) -> None:
        """Add the adapters' outputs for ``inputs [T, K]`` to ``out [T, N]``, in place."""
        ...

    def try_out(self, target: AdapterTarget, prepared: Any, inputs: Tensor) -> Tensor:
        """Return the addition ``[T, N]`` of one adapter at ``target`` for ``inputs [T, K]``; for any thread."""
        ...


class AdapterSlots:
    """``num_slots`` slots of a model with these ``targets``.

    Attributes:
        layers: numbers of inputs and outputs of the layers that can be adapted, by name.
        max_rank: largest rank of an adapter.
        dtype, device: of the computation.
    """

    def __init__(
        self, layout: SlotLayout, targets: list[AdapterTarget], num_slots: int, max_rank: int, like: Tensor
    ) -> None:
        self._layout = layout
        self._targets = targets
        self._place_of = {part.layer: (place, part) for place, target in enumerate(targets) for part in target.parts}
        self._pending: dict[int, Prepared] = {}
        # Content of each slot.
        self._contents: list[Prepared] = [{} for _ in range(num_slots)]
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.layers = layers_of(targets)
        self.dtype, self.device = like.dtype, like.device

    def prepare(self, matrices: Mapping[str, LayerMatrices]) -> Prepared:
        """Lay out an adapter; may run during a step."""
        return {place: self._layout.prepare(self._targets[place], parts) for place, parts in self._by_target(matrices)}

    def try_out(self, prepared: Prepared, layer: str, inputs: Tensor) -> Tensor:
        """Return the addition of a prepared adapter to the outputs of ``layer`` for ``inputs [T, K]``; may run during a
        step.
        """
        place, part = self._place_of[layer]
        return self._layout.try_out(self._targets[place], prepared[place], inputs)[:, part.start : part.end]

    def assign(self, slot: int, prepared: Prepared) -> None:
        """Let the slot hold ``prepared`` from the next ``flush`` on."""
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

    def _by_target(self, matrices: Mapping[str, LayerMatrices]) -> list[tuple[int, list[LoraPart]]]:
        parts: dict[int, list[LoraPart]] = {}
        for layer, pair in matrices.items():
            place, part = self._place_of[layer]
            parts.setdefault(place, []).append(LoraPart(part.start, pair.a, pair.b))
        return [(place, sorted(group, key=lambda part: part.first_output)) for place, group in sorted(parts.items())]


def zeros_like_outputs(target: AdapterTarget, inputs: Tensor) -> Tensor:
    """Return zeros ``[T, N]`` in the shape of the target's outputs."""
    return torch.zeros(len(inputs), target.linear.out_features, dtype=inputs.dtype, device=inputs.device)
