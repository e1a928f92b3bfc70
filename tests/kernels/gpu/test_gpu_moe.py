"""Routing and experts in Triton against the reference in float64, and that against transformers' own modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from penstock.kernels import moe
from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.moe import reference

gpu = pytest.importorskip("penstock.kernels.moe.gpu", reason="needs triton")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUTINGS: list[dict[str, Any]] = [
    {"scoring": "softmax", "renormalizes": True, "bias": None, "scale": 1.0},
    {"scoring": "softmax", "renormalizes": False, "bias": None, "scale": 1.0},
    {"scoring": "sigmoid", "renormalizes": True, "bias": torch.linspace(-1, 1, 41), "scale": 2.5},
]


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=["softmax, renormalised", "softmax", "sigmoid"])
def test_route(
    routing: dict[str, Any], dtype: torch.dtype, device: torch.device, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    logits = torch.full((17, 50), torch.nan, dtype=dtype)[:, 5:46]
    logits.copy_(random(17, 41, dtype=dtype))
    logits[0] = 0.0  # of equal ones the first
    on_device = dict(routing, bias=None if routing["bias"] is None else routing["bias"].to(device))
    weights, ids = gpu.route(logits.to(device), 6, **on_device)
    expected_weights, expected_ids = reference.route(logits.double(), 6, **routing)
    assert_close(weights.cpu(), expected_weights)
    assert torch.equal(ids.cpu(), expected_ids)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, which the interpreter uses, warns of NaN
def test_a_row_of_nan_goes_to_some_experts(device: torch.device) -> None:
    _, ids = gpu.route(torch.full((1, 9), torch.nan, device=device), 3, "softmax", True, None, 1.0)
    assert sorted(ids[0].tolist()) == [0, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 63])
def test_experts(
    num_tokens: int, dtype: torch.dtype, device: torch.device, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    num_experts, size, inner = 5, 72, 40
    hidden = random(num_tokens, size, dtype=dtype)
    gate_up = random(num_experts, 2 * inner, size, dtype=dtype, scale=size**-0.5)
    down = random(num_experts, size, inner, dtype=dtype, scale=inner**-0.5)
    weights, ids = reference.route(random(num_tokens, num_experts), 2, "softmax", True, None, 1.0)
    weights = weights.to(dtype)
    result = gpu.experts(*(tensor.to(device) for tensor in (hidden, gate_up, down, weights, ids)))
    expected = reference.experts(hidden.double(), gate_up.double(), down.double(), weights, ids)
    assert_close(result.cpu(), expected)


def test_the_reference_matches_transformers() -> None:
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 24, "num_experts_per_tok": 3}
    qwen: Any = Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(**sizes, moe_intermediate_size=24, num_experts=7, norm_topk_prob=False)
    ).double()
    mixtral: Any = MixtralSparseMoeBlock(MixtralConfig(**sizes, num_local_experts=7)).double()
    hidden = random(9, 48).double()
    for block, renormalizes in ((qwen, False), (mixtral, True)):
        for parameter in block.parameters():
            parameter.data = random(*parameter.shape, scale=0.3).double()
        logits = hidden @ block.gate.weight.T
        weights, ids = reference.route(logits, 3, "softmax", renormalizes, None, 1.0)
        gate_up, down = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        expected = block(hidden[None])[0].detach()
        # Their router computes in float32, whatever the dtype.
        torch.testing.assert_close(moe.experts(hidden, gate_up, down, weights, ids), expected, rtol=1e-5, atol=1e-5)


def test_the_sigmoid_form_is_that_of_deepseek() -> None:
    router: Any = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=16,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.5,
        )
    )
    router.weight.data = random(8, 16)
    router.e_score_correction_bias = random(8, scale=0.3)
    hidden = random(20, 16)
    logits, expected, expected_ids = router(hidden)
    weights, ids = reference.route(logits.detach(), 3, "sigmoid", True, router.e_score_correction_bias, 2.5)
    order, expected_order = ids.argsort(dim=-1), expected_ids.argsort(dim=-1)
    assert torch.equal(ids.long().gather(1, order), expected_ids.gather(1, expected_order))
    torch.testing.assert_close(weights.gather(1, order), expected.detach().gather(1, expected_order))


def test_wrong_inputs_are_named() -> None:
    hidden, gate_up, down = torch.zeros(3, 8), torch.zeros(2, 10, 8), torch.zeros(2, 8, 5)
    weights, ids = torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    for call, name in (
        (lambda: moe.route(torch.zeros(3), 1), "logits must"),
        (lambda: moe.route(torch.zeros(3, 4), 5), "num_chosen must"),
        (lambda: moe.route(torch.zeros(3, 4), 2, bias=torch.zeros(3)), "bias must"),
        (lambda: moe.experts(hidden, gate_up, torch.zeros(2, 8, 4), weights, ids), "hidden, gate_up and down"),
        (lambda: moe.experts(hidden.half(), gate_up, down, weights, ids), "gate_up and down must be"),
        (lambda: moe.experts(hidden, gate_up, down.mT.contiguous().mT, weights, ids), "must be contiguous"),
        (lambda: moe.experts(hidden, gate_up, down, weights[:2], ids[:2]), "weights and ids must both"),
        (lambda: moe.experts(hidden, gate_up, down, weights, ids.float()), "weights and ids must be floats"),
    ):
        with pytest.raises(KernelInputError, match=name):
            call()
    assert not moe.has_kernel(torch.device("cpu"), torch.float32)
