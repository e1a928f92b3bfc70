"""Models of transformers' as GGUF files, named and laid out as llama.cpp's converter does it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from .gguf_writer import KINDS, Array, Blocks, draw, plain, write_gguf

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_EXPERTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def gguf_name(name: str) -> str:
    """Return the GGUF name of one of transformers' tensors; for an expert, that of the stack."""
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    if ".experts." in inner:
        return f"blk.{layer}.ffn_{_EXPERTS[inner.rpartition('.')[2]]}_exps.{kind}"
    return f"blk.{layer}.{_LAYER[inner]}.{kind}"


def interleaved(weight: Array, num_heads: int) -> Array:
    """``permute`` of llama.cpp's converter."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def restored(weight: Array, num_heads: int) -> Array:
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def drawn_model(state: dict[str, Tensor], config: PretrainedConfig, kinds: tuple[str, ...] = KINDS) -> Any:
    """Matrices drawn in ``kinds`` by turns, and what they stand for: (tensors, shapes, transformers' weights)."""
    rng, turn = np.random.default_rng(0), itertools.cycle(kinds)
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    permutes = config.model_type in ("llama", "mixtral")
    tensors: dict[str, Blocks] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    weights: dict[str, Tensor] = {}
    stacks: dict[str, list[Blocks]] = {}
    for name, tensor in state.items():
        target = gguf_name(name)
        count = next((count for part, count in heads.items() if part in target), None) if permutes else None
        if tensor.dim() == 1:
            blocks = plain("F32", (interleaved(tensor.numpy(), count) if count else tensor.numpy())[None])
            tensors[target], shapes[target] = blocks, (len(tensor),)
            weights[name] = tensor
            continue
        kind = stacks[target][0].kind if target in stacks else next(turn)
        blocks = draw(kind, rng, (tensor.shape[0], tensor.shape[1]))
        weights[name] = torch.from_numpy(restored(blocks.weight, count) if count else blocks.weight).contiguous()
        if ".experts." in name:
            stacks.setdefault(target, []).append(blocks)
        else:
            tensors[target] = blocks
    for target, stack in stacks.items():
        data, weight = np.concatenate([b.data for b in stack]), np.concatenate([b.weight for b in stack])
        tensors[target] = Blocks(stack[0].kind, data, weight)
        shapes[target] = (len(stack), *stack[0].weight.shape)
    return tensors, shapes, weights


def values_of(config: PretrainedConfig, key: str) -> dict[str, Any]:
    """The keys that say what config.json does."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if num_experts:
        numbers |= {"expert_count": num_experts, "expert_used_count": config.num_experts_per_tok}
    if key == "qwen3moe":
        numbers["expert_feed_forward_length"] = config.moe_intermediate_size
    return {"general.architecture": key, **{f"{key}.{name}": value for name, value in numbers.items()}}


def vocabulary(size: int) -> dict[str, Any]:
    """A tokenizer of ``size`` tokens: the 256 bytes would not fit, so that these are words of one letter."""
    tokens = ["<unk>", "<s>", "</s>", *(chr(0x100 + index) for index in range(size - 4)), "\u0100\u0101"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (size - 3)],
        "tokenizer.ggml.merges": ["\u0100 \u0101"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_model(path: Path, config: PretrainedConfig, key: str, drawn: Any, **more: Any) -> Path:
    """A whole file; ``more`` are further values, dots as ``__``."""
    tensors, shapes, _ = drawn
    values = {
        **values_of(config, key),
        **vocabulary(config.vocab_size),
        **{k.replace("__", "."): v for k, v in more.items()},
    }
    return write_gguf(path, values, tensors, shapes)
