"""Adapters where they are computed with: a number of slots, each with one adapter beside all layers of the model.

What is loaded is prepared once, by any thread. A slot changes between two steps: ``assign`` only says what it is to
hold, and ``flush`` puts it there, when nothing computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ....kernels.lora.packed import LoraPart
from .peft_folder import LayerMatrices
from .targets import AdapterTarget, layers_of

# What an adapter does at a site, by the site's place among them, in the layout of those slots.
Prepared = Mapping[int, Any]


class SlotLayout(Protocol):
    """How adapters lie beside a model, and what computes with them."""

    def prepare(self, site: AdapterTarget, parts: Sequence[LoraPart]) -> Any:
        """Lay out what one adapter does at ``site``."""
        ...

    def put(self, place: int, slot: int, prepared: Any | None) -> None:
        """Put that into a slot of the site at ``place``; None empties it."""
        ...

    def add(self, place: int, inputs: Tensor, token_lora: Tensor, out: Tensor) -> None:
        """Add to ``out [T, N]`` what the adapters of its rows make of ``inputs [T, K]``, in place."""
        ...

    def try_out(self, site: AdapterTarget, prepared: Any, inputs: Tensor) -> Tensor:
        """What one adapter adds at ``site`` for ``inputs [T, K]``, ``[T, N]``; by any thread."""
        ...


class AdapterSlots:
    """``num_slots`` slots of the model with these ``sites``.

    Attributes:
        layers: that can be adapted, by their names, with their numbers of inputs and outputs.
        max_rank: the largest of an adapter.
        dtype, device: in which and where adapters are computed.
    """

    def __init__(
        self, layout: SlotLayout, sites: list[AdapterTarget], num_slots: int, max_rank: int, like: Tensor
    ) -> None:
        self._layout = layout
        self._sites = sites
        self._place_of = {part.layer: (place, part) for place, site in enumerate(sites) for part in site.parts}
        self._pending: dict[int, Prepared] = {}
        # What lies in each slot.
        self._held: list[Prepared] = [{} for _ in range(num_slots)]
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.layers = layers_of(sites)
        self.dtype, self.device = like.dtype, like.device

    def prepare(self, matrices: Mapping[str, LayerMatrices]) -> Prepared:
        """Lay out an adapter; may run beside a step."""
        return {place: self._layout.prepare(self._sites[place], parts) for place, parts in self._by_site(matrices)}

    def try_out(self, prepared: Prepared, layer: str, inputs: Tensor) -> Tensor:
        """What a prepared adapter adds to the outputs of ``layer`` for ``inputs [T, K]``; may run beside a step."""
        place, part = self._place_of[layer]
        return self._layout.try_out(self._sites[place], prepared[place], inputs)[:, part.start : part.end]

    def assign(self, slot: int, prepared: Prepared) -> None:
        """From the next ``flush`` on the slot holds ``prepared``."""
        self._pending[slot] = prepared

    def flush(self) -> None:
        """Let the slots hold what they were assigned. To be called when nothing computes."""
        while self._pending:
            slot, prepared = next(iter(self._pending.items()))
            for place in range(len(self._sites)):
                if place in prepared or place in self._held[slot]:
                    self._layout.put(place, slot, prepared.get(place))
            self._held[slot] = prepared
            del self._pending[slot]

    def _by_site(self, matrices: Mapping[str, LayerMatrices]) -> list[tuple[int, list[LoraPart]]]:
        parts: dict[int, list[LoraPart]] = {}
        for layer, pair in matrices.items():
            place, part = self._place_of[layer]
            parts.setdefault(place, []).append(LoraPart(part.start, pair.a, pair.b))
        return [(place, sorted(found, key=lambda part: part.first_output)) for place, found in sorted(parts.items())]


def zeros_like_outputs(site: AdapterTarget, inputs: Tensor) -> Tensor:
    """``[T, N]`` for what a site adds."""
    return torch.zeros(len(inputs), site.linear.out_features, dtype=inputs.dtype, device=inputs.device)
