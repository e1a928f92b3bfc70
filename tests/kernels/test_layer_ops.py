"""The references of the operations between the products of a layer: transformers' own modules, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_glm_rotary_pos_emb
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_partial_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.gated_activation import ACTIVATIONS, activate, activate_and_mul, gelu_and_mul, silu_and_mul
from penstock.kernels.kv_cache import store_kv_cache
from penstock.kernels.rms_norm import add_rms_norm, rms_norm
from penstock.kernels.rotary import apply_rotary, rotary_and_store

pytestmark = pytest.mark.usefixtures("references")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD_SHAPES = [(1, 8), (7, 41), (63, 1000)]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), ODD_SHAPES)
def test_rms_norm_is_that_of_transformers(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    own = LlamaRMSNorm(size, eps=1e-5).to(dtype)
    own.weight.data = random(size, dtype=dtype)
    inputs = random(num_tokens, size, dtype=dtype)
    assert torch.equal(rms_norm(inputs, own.weight.detach(), 1e-5), own(inputs).detach())
    strided = random(num_tokens, 2 * size, dtype=dtype)[:, size:]
    assert torch.equal(rms_norm(strided, own.weight.detach(), 1e-5), own(strided).detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), ODD_SHAPES)
def test_add_rms_norm_returns_the_sum_too(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    inputs, residual = random(num_tokens, size, dtype=dtype), random(size, num_tokens, dtype=dtype).T
    weight = random(size, dtype=dtype)
    expected = residual + inputs
    normed, summed = add_rms_norm(inputs.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(summed, expected)
    assert torch.equal(normed, rms_norm(expected, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 1, 2), (9, 7, 42), (63, 5, 128)])
def test_apply_rotary_is_that_of_transformers(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    fused = random(num_tokens, num_heads + 2, head_dim, dtype=dtype)
    heads = fused[:, 1:-1]
    angles = random(num_tokens, head_dim // 2, dtype=dtype).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    before = fused.clone()
    by_head = heads.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(by_head, by_head, cos[None], sin[None])
    assert torch.equal(apply_rotary(heads, cos, sin), expected[0].transpose(0, 1))
    assert torch.equal(fused, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_in_float32_is_applied_before_the_rounding(dtype: torch.dtype) -> None:
    own = Gemma3RMSNorm(41, eps=1e-5).to(dtype)
    own.weight.data = random(41, dtype=dtype)
    inputs = random(7, 41, dtype=dtype)
    assert torch.equal(rms_norm(inputs, 1.0 + own.weight.detach().float(), 1e-5), own(inputs).detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_interleaved_pairs_are_those_of_transformers(dtype: torch.dtype) -> None:
    heads = random(9, 5, 48, dtype=dtype)
    angles = random(9, 16, dtype=dtype).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    by_head = heads.transpose(0, 1)[None]
    expected, _ = apply_glm_rotary_pos_emb(by_head, by_head, cos[None], sin[None])
    assert torch.equal(apply_rotary(heads, cos, sin, is_interleaved=True), expected[0].transpose(0, 1))


def test_activations_by_name() -> None:
    gate_up = random(7, 2 * 41, dtype=torch.float32)
    for name in ACTIVATIONS:
        assert torch.equal(activate_and_mul(gate_up, name), activate(gate_up[:, :41], name) * gate_up[:, 41:])
    assert torch.equal(activate(gate_up, "relu2"), ACT2FN["relu2"](gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), ODD_SHAPES)
def test_silu_and_mul_is_the_middle_of_a_llama_mlp(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    act_fn = LlamaMLP(LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8)).act_fn
    gate_up = random(num_tokens, 2 * size, dtype=dtype)
    expected = act_fn(gate_up[:, :size]) * gate_up[:, size:]
    assert torch.equal(silu_and_mul(gate_up), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "approximate"), [("gelu_pytorch_tanh", "tanh"), ("gelu", "none")])
def test_gelu_and_mul_is_the_middle_of_such_an_mlp(activation: str, approximate: str, dtype: torch.dtype) -> None:
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, hidden_act=activation)
    gate_up = random(7, 2 * 41, dtype=dtype)
    expected = LlamaMLP(config).act_fn(gate_up[:, :41]) * gate_up[:, 41:]
    assert torch.equal(gelu_and_mul(gate_up, approximate=approximate), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_a_head_is_rotated_as_in_gpt_neox(dtype: torch.dtype) -> None:
    heads = random(9, 7, 42, dtype=dtype)
    angles = random(9, 5, dtype=dtype).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    by_head = heads.transpose(0, 1)[None]
    expected, _ = apply_partial_rotary_pos_emb(by_head, by_head, cos[None], sin[None])
    assert torch.equal(apply_rotary(heads, cos, sin), expected[0].transpose(0, 1))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_rotary_and_store_is_both(cache_dtype: torch.dtype) -> None:
    fused = random(5, 3 + 2 * 2, 8, dtype=torch.bfloat16)
    query_key, value = fused.split([5, 2], dim=1)
    angles = random(5, 4, dtype=torch.bfloat16).repeat(1, 2)
    slots = torch.tensor([4, -1, 0, 7, 2])
    scales: dict[str, Any] = {"key_scale": 0.5, "value_scale": 2.0} if cache_dtype.itemsize == 1 else {}
    result, expected = ([torch.zeros(2, 4, 2, 8, dtype=cache_dtype) for _ in range(2)] for _ in range(2))
    query = rotary_and_store(query_key, value, angles.cos(), angles.sin(), result[0], result[1], slots, **scales)
    rotated = apply_rotary(query_key, angles.cos(), angles.sin())
    store_kv_cache(rotated[:, 3:], value, expected[0], expected[1], slots, **scales)
    assert torch.equal(query, rotated[:, :3])
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        assert ours.float().any()


def test_wrong_inputs_are_named() -> None:
    x = torch.zeros(3, 8)
    heads = torch.zeros(3, 2, 8)
    cache, slots = torch.zeros(4, 2, 1, 8), torch.zeros(3, dtype=torch.int64)
    for call, name in (
        (lambda: rms_norm(x, torch.zeros(7), 1e-5), "weight must"),
        (lambda: rms_norm(x, torch.zeros(8, dtype=torch.bfloat16), 1e-5), "weight must"),
        (lambda: add_rms_norm(x, torch.zeros(2, 8), torch.zeros(8), 1e-5), "residual must"),
        (lambda: apply_rotary(x, x, x), "heads must"),
        (lambda: apply_rotary(heads, torch.zeros(2, 8), x), "cos must"),
        (lambda: apply_rotary(heads, torch.zeros(3, 10), torch.zeros(3, 10)), "cos must"),
        (lambda: apply_rotary(heads, x[:, :7], x[:, :7]), "cos must"),
        (lambda: apply_rotary(heads, x, x[:, :6]), "sin must"),
        (lambda: apply_rotary(heads, x, x.bfloat16()), "sin must"),
        (lambda: rotary_and_store(heads, heads, x, x, cache, cache, slots), "query_key must"),
        (lambda: rotary_and_store(heads, heads[:, 1:], x, x, cache[..., :2], cache, slots), "key_cache must"),
        (lambda: rotary_and_store(heads, heads[:, 1:], x, x, cache, cache.half(), slots), "value_cache must"),
        (lambda: rotary_and_store(heads, heads[:, 1:], x, x, cache, cache, slots[:2]), "slot_mapping must"),
        (lambda: silu_and_mul(torch.zeros(3, 7)), "gate_up must"),
        (lambda: gelu_and_mul(torch.zeros(3, 7)), "gate_up must"),
        (lambda: gelu_and_mul(x, approximate="sigmoid"), "approximate must"),
    ):
        with pytest.raises(KernelInputError, match=name):
            call()
