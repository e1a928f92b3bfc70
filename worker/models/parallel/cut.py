"""Cut a whole Llama-like model of transformers, and its lean plan, into the part of one rank.

Rows of the projections into heads and into the feed-forward part are cut, and columns of the projections out of them,
as in Shoeybi et al. 2019 (arXiv:1909.08053): two sums over the ranks per layer. The result is still a model of
transformers, whose own code computes with the heads that it finds, so every mode that computes whole models computes
parts, too.

The embeddings stay whole. The head is cut by words if the ranks can share them evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from msgspec.structs import asdict, replace
from torch import Tensor, nn

from ....shared.errors import ConfigurationError
from ..plan import AttentionPlan, DecoderPlan, LayerPlan
from .groups import ConcatOverRanks, RankGroups, SumOverRanks
from .layout import ParallelLayout


def plan_of_part(whole: DecoderPlan, layout: ParallelLayout, rank: int) -> DecoderPlan:
    """Return the plan of ``rank``, which matches the module that ``cut_decoder`` leaves: its layers, with its heads."""
    layers = layout.stage_layers(rank, len(whole.layers))
    parts = [_layer_of_part(whole.layers[index], layout.tensor, index, number) for number, index in enumerate(layers)]
    return replace(whole, layers=tuple(parts))


def _layer_of_part(layer: LayerPlan, num_ranks: int, index: int, number: int) -> LayerPlan:
    """Return the plan of one layer.

    Args:
        index: of the layer in the whole model.
        number: of the layer in the part.
    """
    # All families that ranks cut by this plan have attention in every layer.
    assert isinstance(layer.attention, AttentionPlan)
    mine = replace(layer, attention=_heads_of_part(layer.attention, num_ranks))
    return mine if index == number else _rename_modules(mine, f".{index}.", f".{number}.")


def _heads_of_part(attention: AttentionPlan, num_ranks: int) -> AttentionPlan:
    # With fewer key and value heads than ranks, several ranks have the same one.
    num_kv_heads = max(1, attention.num_kv_heads // num_ranks)
    return replace(attention, num_heads=attention.num_heads // num_ranks, num_kv_heads=num_kv_heads)


def _rename_modules(value: Any, before: str, after: str) -> Any:
    """Return ``value`` with all names of modules in it moved to another layer."""
    if isinstance(value, str):
        return value.replace(before, after, 1)
    if isinstance(value, tuple):
        return tuple(_rename_modules(item, before, after) for item in value)
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: _rename_modules(field, before, after) for name, field in asdict(value).items()})
    return value


def check_layout(model_config: Any, layout: ParallelLayout, architecture: str) -> None:
    """Verify that the ranks of ``layout`` can share a Llama-like model of ``model_config``.

    Raises:
        ConfigurationError: they cannot; the message names the option and possible values.
    """
    num_heads = model_config.num_attention_heads
    num_kv_heads = getattr(model_config, "num_key_value_heads", None) or num_heads
    check_shares(num_heads, layout, f"attention heads of {architecture}")
    # With fewer key and value heads than ranks, several ranks have the same one.
    if num_kv_heads % layout.tensor and layout.tensor % num_kv_heads:
        raise ConfigurationError(
            f"tensor_parallel_size is {layout.tensor}, but {architecture} has {num_kv_heads} heads of keys and values, "
            f"which are neither a multiple nor a divisor of it; use {_any_of(_divisors(num_kv_heads))}"
        )
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        size = getattr(model_config, name, None)
        if isinstance(size, int):
            check_shares(size, layout, f"{name} of {architecture}")
    if layout.pipeline > model_config.num_hidden_layers:
        raise ConfigurationError(
            f"pipeline_parallel_size is {layout.pipeline}, but {architecture} has {model_config.num_hidden_layers} "
            f"layers; use at most as many stages"
        )


def check_shares(total: int, layout: ParallelLayout, what: str) -> None:
    """Raise ``ConfigurationError`` if the ranks of a stage cannot share ``total`` of something evenly."""
    if total % layout.tensor:
        raise ConfigurationError(
            f"tensor_parallel_size is {layout.tensor}, but the {total} {what} cannot be shared evenly by as many "
            f"ranks; use {_any_of(_divisors(total))}"
        )


def cut_decoder(module: Any, groups: RankGroups) -> None:
    """Reduce ``module``, a Llama-like model of transformers, to the part of ``groups``' rank, in place."""
    base = module.model
    if groups.layout.pipeline > 1:
        _take_stage(module, groups)
    if groups.layout.tensor > 1:
        for layer in base.layers:
            _cut_attention(layer.self_attn, groups)
            _cut_feed_forward(layer.mlp, groups)
            if hasattr(layer.mlp, "down_proj"):
                layer.mlp.down_proj = SumOverRanks(layer.mlp.down_proj, groups)
            else:
                layer.mlp = SumOverRanks(layer.mlp, groups)
        module.lm_head = _cut_head(module.lm_head, base.embed_tokens, groups)


def _cut_attention(attention: Any, groups: RankGroups) -> None:
    size, rank = groups.layout.tensor, groups.tensor_rank
    head_dim = attention.head_dim
    num_heads, num_kv_heads = (proj.out_features // head_dim for proj in (attention.q_proj, attention.k_proj))
    heads = _share(num_heads, size, rank)
    first_kv_head = rank * num_kv_heads // size
    kv_heads = slice(first_kv_head, first_kv_head + max(1, num_kv_heads // size))
    _keep_rows(attention.q_proj, _scaled(heads, head_dim))
    for projection in (attention.k_proj, attention.v_proj):
        _keep_rows(projection, _scaled(kv_heads, head_dim))
    attention.num_key_value_groups = (heads.stop - heads.start) // (kv_heads.stop - kv_heads.start)
    _keep_columns(attention.o_proj, _scaled(heads, head_dim), has_bias=rank == 0)
    attention.o_proj = SumOverRanks(attention.o_proj, groups)


def _cut_feed_forward(block: Any, groups: RankGroups) -> None:
    """Cut a dense part, or experts, possibly with a shared expert."""
    size, rank = groups.layout.tensor, groups.tensor_rank
    if hasattr(block, "gate_proj"):
        part = _share(block.gate_proj.out_features, size, rank)
        for projection in (block.gate_proj, block.up_proj):
            _keep_rows(projection, part)
        _keep_columns(block.down_proj, part, has_bias=rank == 0)
        return
    experts = block.experts
    width = experts.down_proj.shape[2]
    part = _share(width, size, rank)
    # Rows of the gate come first, then the gated ones.
    both = [part, slice(width + part.start, width + part.stop)]
    experts.gate_up_proj = _parameter(torch.cat([experts.gate_up_proj[:, rows] for rows in both], dim=1))
    experts.down_proj = _parameter(experts.down_proj[:, :, part].clone())
    if hasattr(block, "shared_expert"):
        _cut_feed_forward(block.shared_expert, groups)


def _cut_head(head: nn.Linear, embeddings: nn.Embedding, groups: RankGroups) -> nn.Module:
    if head.out_features % groups.layout.tensor:
        return head
    rows = _share(head.out_features, groups.layout.tensor, groups.tensor_rank)
    if head.weight is not embeddings.weight:
        _keep_rows(head, rows)
        return ConcatOverRanks(head, groups)
    # If head and embeddings share a matrix, the head is a view of it.
    part = nn.Linear(head.in_features, rows.stop - rows.start, bias=False, device="meta")
    part.weight = _parameter(embeddings.weight.detach()[rows])
    return ConcatOverRanks(part, groups)


def _take_stage(module: Any, groups: RankGroups) -> None:
    """Keep the layers of the rank's stage, and embeddings and head in the first stage."""
    base = module.model
    layers = groups.layout.stage_layers(groups.rank, len(base.layers))
    base.layers = nn.ModuleList(list(base.layers)[layers.start : layers.stop])
    # transformers reads the number of layers and their windows from its configuration.
    config = base.config
    config.num_hidden_layers = len(base.layers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[layers.start : layers.stop]
    if not groups.is_first_stage:
        _keep_one_token(module)


def _keep_one_token(module: Any) -> None:
    """Reduce embeddings and head, which other ranks hold, to the part that a trial forward of token 0 needs."""
    weight = module.model.embed_tokens.weight.detach()
    embeddings = nn.Embedding(1, weight.shape[1], device="meta")
    embeddings.weight = _parameter(weight[:1].clone())
    head = nn.Linear(weight.shape[1], 1, bias=False, device="meta")
    head.weight = embeddings.weight
    module.model.embed_tokens, module.lm_head = embeddings, head


def _keep_rows(linear: nn.Linear, rows: slice) -> None:
    linear.weight = _parameter(linear.weight.detach()[rows].clone())
    if linear.bias is not None:
        linear.bias = _parameter(linear.bias.detach()[rows].clone())
    linear.out_features = len(linear.weight)


def _keep_columns(linear: nn.Linear, columns: slice, *, has_bias: bool) -> None:
    """Keep these columns.

    Args:
        has_bias: only one rank adds the bias, since outputs are summed.
    """
    linear.weight = _parameter(linear.weight.detach()[:, columns].clone())
    linear.in_features = linear.weight.shape[1]
    if not has_bias:
        linear.register_parameter("bias", None)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _share(total: int, size: int, rank: int) -> slice:
    return slice(total * rank // size, total * (rank + 1) // size)


def _scaled(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)


def _divisors(total: int) -> list[int]:
    return [number for number in range(1, min(total, 64) + 1) if total % number == 0]


def _any_of(sizes: Sequence[int]) -> str:
    *rest, last = map(str, sizes)
    return f"{', '.join(rest)} or {last}" if rest else last
