"""Attach adapters to a model: by hooks of its layers, or in the call that computes it whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.decoder import PRODUCTS_PER_LAYER
from ....kernels.lora.packed import can_pack_lora
from ....shared.errors import ConfigurationError
from ..forward import Forward, TokenAdapters
from ..lean.captured import CapturedForward
from ..lean.forward import LeanForward
from ..lean.native import NativeForward
from ..lean.staged import StagedForward, computing_layers
from ..modes.packed import PackedForward
from ..parallel.shares import ModelShares
from ..pooling.compiled_encoder import CompiledEncoder
from ..pooling.encoder import EncoderForward
from .slots import AdapterSlots, PackedLayout, PlainLayout, SlotLayout, StackedLayout
from .targets import (
    AdapterTarget,
    placed_targets_of,
    placed_targets_of_encoder,
    targets_of,
    targets_of_all_tokens,
)


@torch.inference_mode()
def attach_adapters(
    forward: Forward,
    architecture: str,
    num_slots: int,
    max_rank: int,
    *,
    is_deterministic: bool,
    shares: ModelShares | None = None,
    make_slots: Callable[..., AdapterSlots] = AdapterSlots,
) -> AdapterSlots:
    """Give the model of ``forward`` slots for adapters; ``token_lora`` of a step then selects the adapter of each
    token.

    Caches must be allocated again afterwards. Several ranks call this together.

    Args:
        shares: the rank's parts of the model's layers; None for whole layers.
        make_slots: called with the arguments of ``AdapterSlots``.

    Raises:
        ConfigurationError: the model's mode does not support adapters, or not with equal bits.
    """
    like = next(forward.network.parameters()).detach().new_empty(0)
    compiled = computing_layers(forward)
    if isinstance(compiled, NativeForward | CompiledEncoder):
        placed, num_layers = _placed_targets_of(compiled)
        layout = PackedLayout(list(placed), num_slots, PRODUCTS_PER_LAYER * num_layers)
        compiled.use_adapters(layout.of_layers)
        return make_slots(layout, list(placed.values()), num_slots, max_rank, like, shares)
    tokens = _tokens_of(forward)
    if tokens is None:
        raise ConfigurationError(
            f"enable_lora needs a model whose tokens are packed, and {architecture} is computed in the mode "
            f"{forward.mode!r}; leave it out"
        )
    targets = targets_of_all_tokens(forward, targets_of(forward.network))
    if not targets:
        raise ConfigurationError(f"enable_lora: {architecture} has no linear layers that adapters could change")
    layout = _layout_for(targets, num_slots, max_rank, like)
    if is_deterministic and not isinstance(layout, PackedLayout):
        raise ConfigurationError(
            "enable_lora and deterministic need the compiled kernels on the CPU: elsewhere what an adapter adds may "
            "have other bits in other company; leave one of them out"
        )
    tokens.is_used = True
    for place, target in enumerate(targets):
        target.linear.register_forward_hook(_AdapterHook(layout, place, tokens))
    return make_slots(layout, targets, num_slots, max_rank, like, shares)


def _placed_targets_of(forward: NativeForward | CompiledEncoder) -> tuple[dict[int, AdapterTarget], int]:
    """Return the targets of a forward in one call by their place, and its number of layers."""
    if isinstance(forward, CompiledEncoder):
        return placed_targets_of_encoder(forward.network, forward.plan), len(forward.plan.layers)
    return placed_targets_of(forward.network), len(forward.network.layers)


class _AdapterHook:
    """A hook of a linear layer that adds the outputs of the adapters of its rows."""

    def __init__(self, layout: SlotLayout, place: int, tokens: TokenAdapters) -> None:
        self._layout = layout
        self._place = place
        self._tokens = tokens

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        token_lora = self._tokens.slots
        if token_lora is None:
            return None
        rows = output.reshape(-1, output.shape[-1])
        self._layout.add(self._place, inputs[0].reshape(-1, inputs[0].shape[-1]), token_lora, rows)
        return rows.view(output.shape)


def _tokens_of(forward: Forward) -> TokenAdapters | None:
    if isinstance(forward, LeanForward | CapturedForward | StagedForward):
        return forward.network.token_adapters
    if isinstance(forward, EncoderForward):
        return forward.token_adapters
    # Subclasses are packed, too, but compute some tokens separately.
    return forward.token_adapters if type(forward) is PackedForward else None


def _layout_for(targets: list[AdapterTarget], num_slots: int, max_rank: int, like: Tensor) -> SlotLayout:
    if like.device.type == "cuda":
        return StackedLayout(targets, num_slots, max_rank, like)
    if all(can_pack_lora(target.linear.in_features, like.dtype) for target in targets):
        return PackedLayout(range(len(targets)), num_slots, len(targets))
    return PlainLayout(targets, num_slots)
