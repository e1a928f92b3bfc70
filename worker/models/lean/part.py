"""The plan of a part of a model, of which each of several ranks computes one."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from ..parallel.layout import ParallelLayout
from .plan import AttentionPlan, DecoderPlan, LayerPlan


def plan_of_part(whole: DecoderPlan, layout: ParallelLayout, rank: int) -> DecoderPlan:
    """What ``rank`` computes of a model, as ``parallel.cut_decoder`` leaves it: its layers, with its heads."""
    layers = layout.stage_layers(rank, len(whole.layers))
    parts = [_layer_of_part(whole.layers[index], layout.tensor, index, number) for number, index in enumerate(layers)]
    return replace(whole, layers=tuple(parts))


def _layer_of_part(layer: LayerPlan, num_ranks: int, index: int, number: int) -> LayerPlan:
    """``index`` is the layer's place in the whole model, ``number`` that in the part."""
    # Of the families that ranks cut by this plan none mixes tokens in another way than by attention.
    assert isinstance(layer.attention, AttentionPlan)
    mine = replace(layer, attention=_heads_of_part(layer.attention, num_ranks))
    return mine if index == number else _renamed(mine, f".{index}.", f".{number}.")


def _heads_of_part(attention: AttentionPlan, num_ranks: int) -> AttentionPlan:
    # With fewer heads of keys and values than ranks, several ranks have the same one.
    num_kv_heads = max(1, attention.num_kv_heads // num_ranks)
    return replace(attention, num_heads=attention.num_heads // num_ranks, num_kv_heads=num_kv_heads)


def _renamed(value: Any, before: str, after: str) -> Any:
    """``value`` with all names of modules in it below another layer."""
    if isinstance(value, str):
        return value.replace(before, after, 1)
    if isinstance(value, tuple):
        return tuple(_renamed(one, before, after) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value)(**{name: _renamed(held, before, after) for name, held in fields.items()})
    return value
