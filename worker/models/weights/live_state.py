"""The weights of a loaded model by the names of its checkpoint: as they are in memory, whatever the files contain.

The lean layout is converted back to transformers' module, by the inverse of ``lean/layers`` and the same plan. Weights
are used without a copy, unless they are packed or were widened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ....shared.errors import ModelLoadError
from ...config.engine_config import EngineConfig
from ..checkpoint.model_config import read_config
from ..checkpoint.wording import few
from ..images.model_parts import text_module
from ..images.vision_model import is_vision_type
from ..lean.layers.decoder import LayerEmbeddings, LeanDecoder
from ..lean.layers.feed_forward import GatedMlp, OwnMlp, RoutedMlp, SharedExpertMlp, SparseMlp
from ..lean.layers.layer import AnyLayer, HeadNorm, LeanLayer, RowNorm
from ..lean.layers.mixing import MixingLayer
from ..lean.layers.norms import AnyNorm, NoNorm
from ..loaded import LoadedModel
from ..loading.loader import load_module
from ..parallel.groups import local_module
from ..placing.packed_linear import PackedLinear
from ..plan import AttentionPlan, FeedForwardPlan, NormPlan
from ..pooling.encoder import EncoderForward
from ..pooling.loading import as_decoder


@torch.inference_mode()
def live_state(model: LoadedModel, make_module: Callable[[], PreTrainedModel]) -> dict[str, Tensor]:
    """Return all weights on the CPU, in their dtypes; shared ones once.

    Packed weights are unpacked, so this may take as much memory as the weights themselves.

    Args:
        make_module: creates transformers' module of the model, with any weights or none. Weights that the engine does
            not hold stay as created: the head of a model that pools, an omitted vision encoder.

    Raises:
        ModelLoadError: the module has another form than the model, or the engine lacks weights that it needs.
    """
    module = make_module()
    text = text_of(model, module)
    if isinstance(model.network, LeanDecoder):
        give_back(model.network, text)
    else:
        put_modules(model.network, text)
    share_vision_encoder(model, module)
    return checkpoint_state(model, module)


def checkpoint_state(model: LoadedModel, module: PreTrainedModel) -> dict[str, Tensor]:
    """Return the ``plain_state`` of ``module``, which has the weights of ``model``, by the names of the model's
    files.
    """
    if model.weight_conversions is not None:
        cast(Any, module)._weight_conversions = model.weight_conversions
    return plain_state(module)


def empty_module(config: EngineConfig, folder: Path, model: LoadedModel) -> PreTrainedModel:
    """Create transformers' module of ``model`` for ``live_state``.

    It takes no memory, unless a part of the weights is not held and must be read from the files.

    Raises: as ``load_model``.
    """
    # Nothing is computed with it, so options for other devices do not matter.
    on_cpu = msgspec.structs.replace(config, device="cpu", quantization=None, attention_backend="auto")
    model_config = read_config(folder, on_cpu)
    if model.pooling is not None or is_vision_type(model_config):
        return load_module(on_cpu, folder)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            model_config, dtype=model.dtype, trust_remote_code=config.trust_remote_code, attn_implementation="eager"
        )


def plain_state(module: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of ``module`` by their names in the model's files, on the CPU; shared ones once.

    Raises:
        ModelLoadError: some have no content.
    """
    state: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        state |= {prefix + key: value for key, value in part._parameters.items() if value is not None}
        persistent = part._buffers.keys() - part._non_persistent_buffers_set
        state |= {
            prefix + key: value for key, value in part._buffers.items() if value is not None and key in persistent
        }
    # Compared on the device, since two tensors there need no copy to the CPU.
    for name, source in (getattr(module, "all_tied_weights_keys", None) or {}).items():
        if name in state and source in state and _is_same(state[name], state[source]):
            del state[name]
    empty = sorted(name for name, tensor in state.items() if tensor.is_meta)
    if empty:
        raise ModelLoadError(f"the engine does not hold {few(empty)}, which the model's files have")
    # transformers fuses the weights of some architectures while loading; the files have them unfused.
    return {name: tensor.detach().cpu() for name, tensor in revert_weight_conversion(module, state).items()}


def text_of(model: LoadedModel, module: PreTrainedModel) -> PreTrainedModel:
    """Return the part of ``module``, transformers' own, that the network of ``model`` was built from."""
    if model.pooling is not None:
        return module if isinstance(model.forward, EncoderForward) else as_decoder(module, model.architecture)
    return text_module(module) if is_vision_type(module.config) else module


def share_vision_encoder(model: LoadedModel, module: PreTrainedModel) -> None:
    """Let ``module`` use the weights of the vision encoder of ``model``, if it has one."""
    if model.vision is not None:
        put_modules(model.vision.encoder.module, cast(Any, module).model)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return tensor is other or (tensor.is_meta and other.is_meta) or torch.equal(tensor, other)


def put_weight(place: nn.Module, name: str, tensor: Tensor) -> None:
    """Set ``name`` of ``place`` to ``tensor``, without a copy.

    Raises:
        ModelLoadError: ``place`` has nothing of that name and shape.
    """
    former = place._parameters.get(name)
    if former is None or former.shape != tensor.shape:
        there = "none" if former is None else f"{tuple(former.shape)}"
        raise ModelLoadError(f"{type(place).__name__}.{name} is {tuple(tensor.shape)} in memory, {there} in the model")
    place._parameters[name] = nn.Parameter(tensor.detach(), requires_grad=False)


def put_linear(linear: nn.Module, place: nn.Module) -> None:
    """Set weight and bias of the linear layer ``place`` to those of ``linear``, unpacked; either may be wrapped."""
    linear, place = local_module(linear), local_module(place)
    put_weight(place, "weight", cast(Any, linear).weight)
    bias = cast(Any, linear).bias
    if place._parameters.get("bias") is not None:
        put_weight(place, "bias", bias)


def put_modules(network: nn.Module, place: nn.Module) -> None:
    """Set the weights and persistent buffers of ``place`` and its children to those of ``network``, by name."""
    for name, part in network.named_modules():
        target = place.get_submodule(name)
        if isinstance(part, PackedLinear):
            put_linear(part, target)
            continue
        for key, value in part._parameters.items():
            if value is not None:
                put_weight(target, key, value)
        for key in part._buffers.keys() - part._non_persistent_buffers_set:
            target._buffers[key] = part._buffers[key]


def give_back(network: LeanDecoder, own: PreTrainedModel) -> None:
    """Set the weights of ``own``, of the class that ``network`` was built from; both may be one rank's part.

    Raises:
        ModelLoadError: ``own`` has another form.
    """
    plan = network.plan
    try:
        put_modules(network.embed_tokens, own.get_submodule(plan.embedding))
        if network.layer_embeddings is not None:
            _give_layer_embeddings(network.layer_embeddings, own)
        for layer in network.layers:
            assert isinstance(layer, AnyLayer)
            _give_layer(layer, own)
        _give_norm(network.norm, plan.norm, own)
        put_linear(network.lm_head, _linear(own, plan.head))
    except AttributeError as error:
        raise ModelLoadError(f"the model's configuration makes another model than is in memory: {error}") from error


def _give_layer(layer: AnyLayer, own: PreTrainedModel) -> None:
    plan = layer.plan
    _give_norm(layer.input_norm, plan.input_norm, own)
    _give_norm(layer.attention_norm, plan.attention_norm, own)
    _give_norm(layer.mlp_norm, plan.mlp_norm, own)
    _give_norm(layer.mlp_out_norm, plan.mlp_out_norm, own)
    if plan.attention is not None:
        put_linear(layer.o_proj, _linear(own, plan.attention.output))
    if isinstance(layer, LeanLayer):
        _give_attention(layer, own)
    elif isinstance(layer, MixingLayer):
        _give_mixer(layer, own)
    if layer.mlp is not None and plan.mlp is not None:
        _give_feed_forward(layer.mlp, plan.mlp, own)
    part = layer.embedding_part
    if part is not None:
        put_linear(part.gate, _linear(own, part.plan.gate))
        put_linear(part.output, _linear(own, part.plan.output))
        _give_norm(part.norm, part.plan.norm, own)
    if layer.out_scale is not None:
        _put_tensor(own, plan.out_scale, layer.out_scale)


def _give_layer_embeddings(embeddings: LayerEmbeddings, own: PreTrainedModel) -> None:
    put_modules(embeddings.embedding, own.get_submodule(embeddings.plan.embedding))
    put_linear(embeddings.projection, _linear(own, embeddings.plan.projection))
    _give_norm(embeddings.norm, embeddings.plan.norm, own)


def _give_attention(layer: LeanLayer, own: PreTrainedModel) -> None:
    plan = layer.attention
    _split_linear(layer.qkv_proj, [_linear(own, name) for name in plan.qkv])
    _give_head_norm(layer, plan, own)
    if plan.sinks is not None and layer.sinks is not None:
        _put_parameter(own, plan.sinks, layer.sinks)


def _give_mixer(layer: MixingLayer, own: PreTrainedModel) -> None:
    plan, weights = layer.mixer, layer.weights
    _split_linear(layer.rows_proj, [_linear(own, name) for name in plan.inner])
    _put_narrow(own.get_submodule(plan.convolution), "weight", weights.taps.T[:, None])
    parameters = {
        f"{plan.convolution}.bias": weights.taps_bias,
        plan.decay: weights.decay,
        plan.step_bias: weights.step_bias,
        plan.skip: weights.skip,
        f"{plan.norm}.weight": weights.norm,
    }
    for name, tensor in parameters.items():
        if tensor is not None:
            _put_parameter(own, name, tensor)


def _give_norm(norm: AnyNorm, plan: NormPlan | None, own: PreTrainedModel) -> None:
    if plan is None or isinstance(norm, NoNorm):
        return
    module = own.get_submodule(plan.name)
    if getattr(module, "weight", None) is not None:
        _put_narrow(module, "weight", norm.weight.detach() - plan.offset if plan.is_wide else norm.weight)
    if norm.bias is not None:
        _put_narrow(module, "bias", norm.bias)


def _give_head_norm(layer: LeanLayer, plan: AttentionPlan, own: PreTrainedModel) -> None:
    norm = layer.head_norm
    if isinstance(norm, RowNorm):
        _give_norm(norm.query, plan.query_norm, own)
        _give_norm(norm.key, plan.key_norm, own)
    elif isinstance(norm, HeadNorm):
        query_weight, key_weight = norm.weight.detach().tensor_split([plan.num_heads])
        for weight, norm_plan in ((query_weight, plan.query_norm), (key_weight, plan.key_norm)):
            if norm_plan is None:
                continue
            module: Any = own.get_submodule(norm_plan.name)
            if getattr(module, "weight", None) is not None:
                weight = weight - norm_plan.offset if norm_plan.is_wide else weight
                # One row per head; rows of a weight that all heads share are equal.
                _put_narrow(module, "weight", weight[0] if module.weight.ndim == 1 else weight)


def _give_feed_forward(mlp: nn.Module, plan: FeedForwardPlan, own: PreTrainedModel) -> None:
    module: Any = local_module(own.get_submodule(plan.name))
    mlp = local_module(mlp)
    if isinstance(mlp, GatedMlp):
        _give_dense(mlp, plan, own)
    elif isinstance(mlp, RoutedMlp):
        _give_routed(mlp, own)
    elif isinstance(mlp, SharedExpertMlp):
        _give_experts(mlp.routed, module)
        shared = module.shared_expert
        _split_linear(mlp.shared.gate_up_proj, [shared.gate_proj, shared.up_proj])
        put_linear(mlp.shared.down_proj, shared.down_proj)
        put_linear(mlp.gate, module.shared_expert_gate)
    elif isinstance(mlp, SparseMlp):
        _give_experts(mlp, module)
    else:
        assert isinstance(mlp, OwnMlp)
        put_modules(mlp.own, module)
        if mlp.beside is not None:
            put_modules(mlp.beside, own.get_submodule(plan.beside))


def _give_experts(mlp: SparseMlp, own: Any) -> None:
    put_weight(own.gate, "weight", mlp.router_weight)
    put_weight(own.experts, "gate_up_proj", mlp.gate_up_proj)
    put_weight(own.experts, "down_proj", mlp.down_proj)


def _give_routed(mlp: RoutedMlp, own: PreTrainedModel) -> None:
    plan, experts = mlp.plan, own.get_submodule(mlp.plan.name)
    router = plan.router
    tensors = {
        router.weight: mlp.router.weight,
        router.bias: mlp.router.bias,
        router.choice_bias: mlp.router.choice_bias,
    }
    tensors |= {router.input_scale: mlp.router.input_scale, router.expert_scale: mlp.router.expert_scale}
    _give_norm(mlp.router.norm, router.norm, own)
    _give_norm(mlp.input_norm, plan.input_norm, own)
    _give_norm(mlp.out_norm, plan.out_norm, own)
    _give_norm(mlp.shared_norm, plan.shared_norm, own)
    for name, tensor in tensors.items():
        if name and tensor is not None:
            _put_tensor(own, name, tensor)
    for name, linears in ((plan.inner, mlp.gate_up), (plan.down, mlp.down)):
        parts = [cast(Any, linear) for linear in linears]
        put_weight(experts, name, torch.stack([part.weight.T if plan.is_transposed else part.weight for part in parts]))
        if parts[0].bias is not None:
            put_weight(experts, f"{name}_bias", torch.stack([part.bias for part in parts]))
    if mlp.shared is not None and plan.shared is not None:
        _give_dense(mlp.shared, plan.shared, own)
    if mlp.shared_gate is not None:
        put_linear(mlp.shared_gate, _linear(own, plan.shared_gate))


def _give_dense(mlp: GatedMlp, plan: FeedForwardPlan, own: PreTrainedModel) -> None:
    _split_linear(mlp.gate_up_proj, [_linear(own, name) for name in plan.inner])
    put_linear(mlp.down_proj, _linear(own, plan.down))


def _split_linear(fused: nn.Module, parts: Sequence[nn.Linear]) -> None:
    if len(parts) == 1:
        put_linear(fused, parts[0])
        return
    weight, bias = cast(Any, fused).weight, cast(Any, fused).bias
    start = 0
    for part in parts:
        end = start + part.out_features
        put_weight(part, "weight", weight[start:end])
        if part.bias is not None:
            put_weight(part, "bias", bias[start:end])
        start = end
    if start != len(weight):
        raise ModelLoadError(f"layers of {len(weight)} outputs in memory have {start} in the model's configuration")


def _put_narrow(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Do as ``put_weight`` for a tensor that may be widened to float32; converting it back to its own dtype is
    exact.
    """
    former = cast(Tensor, getattr(module, name))
    put_weight(module, name, tensor.detach().to(former.dtype))


def _put_parameter(own: PreTrainedModel, name: str, tensor: Tensor) -> None:
    holder, _, last = name.rpartition(".")
    _put_narrow(own.get_submodule(holder), last, tensor)


def _put_tensor(own: PreTrainedModel, name: str, tensor: Tensor) -> None:
    """Set a parameter, or a persistent buffer."""
    holder, _, last = name.rpartition(".")
    module = own.get_submodule(holder)
    if last in module._buffers:
        former = cast(Tensor, module._buffers[last])
        module._buffers[last] = tensor.detach().reshape(former.shape).to(former.dtype)
    else:
        _put_narrow(module, last, tensor.detach().reshape(cast(Tensor, getattr(module, last)).shape))


def _linear(own: PreTrainedModel, name: str) -> nn.Linear:
    return cast(nn.Linear, own.get_submodule(name))
