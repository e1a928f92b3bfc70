"""The lean path as a mode, the one that is tried first, and the base of forwards that compute it in another way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....kernels.mixers import mix
from ....kernels.rotary import apply_rotary
from ....shared.errors import ModelLoadError
from ..attention.call import AttentionCall, caches_of
from ..attention.page_layout import PageLayout
from ..attention.pages import allocate_pages
from ..forward import ForwardSettings, ModelInput
from ..modes.packed import PackedForward
from ..parallel.groups import RankGroups
from .layers.decoder import LeanDecoder
from .layers.layer import Angles, Attend, LeanLayer
from .layers.mixing import LayerStates, MixingLayer, mix_nothing
from .layers.rotation import AngleTable
from .reading.decoder import read_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LeanForward:
    """A ``forward.Forward`` by the lean path. The structure of layers and their windows are read from the model's own
    code.

    Args:
        network: a decoder on the weights of ``module``; None to create it.
        calls: the attention calls of its layers; None to record those of ``module``.

    Raises:
        ModelLoadError: no plan describes the model; the message names the difference.
    """

    mode = "lean"

    def __init__(
        self,
        module: PreTrainedModel,
        settings: ForwardSettings,
        network: LeanDecoder | None = None,
        calls: Sequence[AttentionCall] | None = None,
    ) -> None:
        self.network = network or LeanDecoder(module, settings.plan or read_decoder(module, settings.max_model_len))
        # For a whole model, the compiled decoder makes its own table.
        if settings.is_batch_invariant and settings.groups is not None and module.device.type == "cpu":
            self.network.make_angles = AngleTable(self.network.angles, settings.max_model_len)
        self._settings = settings
        self._layers = [layer for layer in self.network.layers if isinstance(layer, LeanLayer)]
        self.mixing_layers = [layer for layer in self.network.layers if isinstance(layer, MixingLayer)]
        calls = _recorded_calls(module, settings) if calls is None else calls
        if len(calls) != len(self._layers) or any(call.has_own_rule for call in calls):
            raise ModelLoadError("its layers do not attend once each, causally or within a window")
        # Refer to our layers, so that transformers' can be freed.
        self._calls = [dataclasses.replace(call, module=own) for call, own in zip(calls, self._layers, strict=True)]
        _share_caches(self.network, dict(zip(self._layers, self._calls, strict=True)))
        self.states = LayerStates([layer.weights for layer in self.mixing_layers], module.dtype)

    def network_of(self, module: PreTrainedModel) -> LeanDecoder:
        return LeanDecoder(module, self.network.plan)

    @property
    def takes_embeds(self) -> bool:
        """Whether token ids are not needed besides. Per-layer embeddings need them."""
        return self.network.layer_embeddings is None

    @property
    def max_model_len(self) -> int:
        return self._settings.max_model_len

    @property
    def is_batch_invariant(self) -> bool:
        return self._settings.is_batch_invariant

    @property
    def groups(self) -> RankGroups | None:
        """The ranks that compute the model together; None for one rank."""
        return self._settings.groups

    @property
    def attending_layers(self) -> list[LeanLayer]:
        return self._layers

    @property
    def caches(self) -> list[Tensor]:
        """Keys and values of all layers, ``[NB, BS, KVH, D]`` each."""
        return caches_of(self._calls)

    @property
    def keeps_state(self) -> bool:
        return bool(self.mixing_layers)

    @property
    def bytes_per_request(self) -> int:
        return self.states.bytes_per_request

    @property
    def windows(self) -> list[int | None]:
        """Window of each attention layer in tokens; None for no limit."""
        return [call.window for call in self._calls]

    @property
    def attention_backend(self) -> str:
        return self._settings.attention_backend

    @property
    def attention_calls(self) -> list[AttentionCall]:
        return self._calls

    @property
    def bytes_per_token(self) -> int:
        return sum(call.bytes_per_token for call in self._calls)

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        for call in self._calls:
            call.allocate(num_blocks, block_size, device)
        self.states.allocate(num_slots, device)

    def allocate_pages(
        self, layout: PageLayout, num_pages: int, block_size: int, num_slots: int, device: torch.device
    ) -> None:
        """See ``pages.PagedByGroups``."""
        allocate_pages(self._calls, layout, num_pages, block_size, device)

    def run(self, step: ModelInput) -> Tensor:
        return self.network.logits(self.transform(step))

    def transform(self, step: ModelInput) -> Tensor:
        """Compute ``step`` up to the input of ``lm_head``, ``[R, hidden size]``."""
        attentions = self.attend_to(step)
        self.network.token_adapters.begin(step.token_lora)
        inputs = self.network.embed_tokens(step.token_ids) if step.inputs_embeds is None else step.inputs_embeds
        return self.network.transform(inputs, step.token_ids, step.positions, step.logit_rows, attentions)

    def attend_to(self, step: ModelInput) -> list[Attend]:
        """Return the attention function of each layer for the tokens of ``step``."""
        shared: dict[str, Any] = {
            "is_batch_invariant": self._settings.is_batch_invariant,
            "backend": self._settings.attention_backend,
        }
        attentions = {
            layer: partial(
                call.rotate_and_attend,
                batch=step.batch.for_group(call.group),
                scale=layer.scale,
                softcap=layer.attention.softcap,
                sinks=layer.sinks,
                **shared,
            )
            for call, layer in zip(self._calls, self._layers, strict=True)
        }
        mixings = self._mixings_of(step) if self.mixing_layers else {}
        return [{**attentions, **mixings}.get(layer, _attend_to_nothing) for layer in self.network.layers]

    def _mixings_of(self, step: ModelInput) -> dict[nn.Module, Attend]:
        batch = self.states.begin(step)
        return {
            layer: partial(mix, weights=layer.weights, state=state, batch=batch)
            for layer, state in zip(self.mixing_layers, self.states.states, strict=True)
        }

    def commit(self) -> None:
        """Commit the states. Keys and values need nothing, since a step that is computed again writes them again."""
        self.states.commit()

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        positions = torch.arange(
            min(num_tokens, self._settings.max_model_len), device=self.network.embed_tokens.weight.device
        )
        attentions = self.attend_to_nothing()
        self.network.token_adapters.begin(None)
        token_ids = torch.zeros_like(positions)
        inputs = self.network.embed_tokens(token_ids)
        self.network(inputs, token_ids, positions, positions[-num_logit_rows:], attentions)

    def attend_to_nothing(self) -> list[Attend]:
        """Return stubs instead of ``attend_to``, to measure the rest of a forward."""
        return [
            partial(mix_nothing, num_outputs=layer.weights.num_outputs)
            if isinstance(layer, MixingLayer)
            else _attend_to_nothing
            for layer in self.network.layers
        ]


def _recorded_calls(module: PreTrainedModel, settings: ForwardSettings) -> list[AttentionCall]:
    packed = PackedForward(module, settings)
    calls = packed.attention_calls
    packed.forget_attentions()
    return calls


def _share_caches(network: LeanDecoder, calls: dict[LeanLayer, AttentionCall]) -> None:
    """Let layers that attend to another layer's keys and values use its cache.

    Raises:
        ModelLoadError: their window or their shapes differ.
    """
    for layer, call in calls.items():
        if layer.attention.source is None:
            continue
        source = network.layers[layer.attention.source]
        assert isinstance(source, LeanLayer)
        source_call = calls[source]
        if (source_call.window, source_call.key_shape, source_call.value_shape) != (
            call.window,
            call.key_shape,
            call.value_shape,
        ):
            raise ModelLoadError("one of its layers attends to another's keys and values, and sees further than that")
        call.source = source_call


def _attend_to_nothing(query_key: Tensor, value: Tensor, angles: Angles | None, is_interleaved: bool) -> Tensor:
    """Return zeros, but rotate, because the rotation takes memory of a step."""
    if angles is not None:
        query_key = apply_rotary(query_key, *angles, is_interleaved=is_interleaved)
    return torch.zeros_like(query_key[:, : query_key.shape[1] - value.shape[1]])


class LeanWrapper:
    """The methods of ``forward.Forward`` that follow from ``lean``, on the same weights."""

    mode = "lean"

    def __init__(self, lean: LeanForward) -> None:
        self.network = lean.network
        self.lean = lean

    def network_of(self, module: PreTrainedModel) -> LeanDecoder:
        return self.lean.network_of(module)

    @property
    def takes_embeds(self) -> bool:
        return self.lean.takes_embeds

    @property
    def attention_calls(self) -> list[AttentionCall]:
        return self.lean.attention_calls

    @property
    def keeps_state(self) -> bool:
        return self.lean.keeps_state

    @property
    def bytes_per_request(self) -> int:
        return self.lean.bytes_per_request

    @property
    def bytes_per_token(self) -> int:
        return self.lean.bytes_per_token

    def commit(self) -> None:
        self.lean.commit()

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        self.lean.profile(num_tokens, num_logit_rows)
