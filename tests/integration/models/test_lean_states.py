"""Layers that keep states are read and computed as those that attend: the same results, and a token the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.decoder import AttentionGate
from penstock.kernels.mixers import MixerKind
from penstock.shared.errors import ModelLoadError
from penstock.worker.models.adapters.attach import attach_adapters
from penstock.worker.models.adapters.peft_folder import LayerMatrices
from penstock.worker.models.adapters.targets import layers_of, targets_of
from penstock.worker.models.checks.conformance import (
    FOUR_BITS_TOLERANCE,
    QUANTIZED_TOLERANCE,
    ReferenceRun,
    check_conformance,
)
from penstock.worker.models.forward import Forward
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.lean.native import NativeForward, make_native
from penstock.worker.models.lean.reading.decoder import read_decoder
from penstock.worker.models.modes.cached import split_forward
from penstock.worker.models.modes.partition import CutRule
from penstock.worker.models.placing.packed_linear import pack_linear_layers
from penstock.worker.models.plan import AttentionPlan, MixerPlan

from .lean_models import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    SETTINGS,
    STATES,
    logits_of,
    make_model,
    make_step,
    run_and_commit,
    steps,
)

pytestmark = pytest.mark.usefixtures("compiled")


def native_forward(variant: str, dtype: torch.dtype, quantization: str | None = None) -> NativeForward:
    lean = LeanForward(make_model(variant, dtype), SETTINGS)
    pack_linear_layers(lean.network, quantization)
    forward = make_native(lean, BLOCK_SIZE)
    assert isinstance(forward, NativeForward)
    assert forward.keeps_state
    assert forward.bytes_per_request > 0
    return forward


@pytest.mark.parametrize("variant", STATES)
@torch.inference_mode()
def test_logits_are_those_of_the_general_way(variant: str) -> None:
    truth = logits_of(split_forward(make_model(variant, torch.float32), SETTINGS, CutRule()))
    lean = logits_of(LeanForward(make_model(variant, torch.float32), SETTINGS))
    for ours in (lean, logits_of(native_forward(variant, torch.float32))):
        torch.testing.assert_close(torch.cat(ours), torch.cat(truth), rtol=1e-3, atol=1e-3)
    theirs = torch.cat(logits_of(split_forward(make_model(variant, torch.bfloat16), SETTINGS, CutRule()))).float()
    rounded, whole = torch.cat(logits_of(native_forward(variant, torch.bfloat16))), torch.cat(truth)
    assert (rounded - whole).norm() <= 2 * (theirs - whole).norm()


@pytest.mark.parametrize("variant", ["lfm3", "qwen3.5", "qwen3 next", "bamba"])
@torch.inference_mode()
def test_a_token_has_the_same_bits_however_its_request_is_cut(variant: str) -> None:
    forward = native_forward(variant, torch.bfloat16)
    token_ids = torch.randint(0, 97, (3, 30), generator=torch.Generator().manual_seed(1))
    table = torch.arange(24).view(3, 8)

    def last_of_first(*cuts: list[tuple[int, int]]) -> Tensor:
        computed = [0, 0, 0]
        forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
        made = [run_and_commit(forward, make_step(cut, computed, token_ids, table, BLOCK_SIZE)) for cut in cuts]
        return made[-1][0]

    whole = last_of_first([(0, 14)])
    assert torch.equal(last_of_first([(0, 3)], [(0, 10)], [(0, 1)]), whole)
    assert torch.equal(last_of_first([(1, 5), (0, 13)], [(0, 1), (1, 1), (2, 9)]), whole)


@pytest.mark.parametrize("variant", ["lfm2", "nemotron hybrid"])
@torch.inference_mode()
def test_a_step_that_was_not_committed_leaves_nothing(variant: str) -> None:
    forward = native_forward(variant, torch.float32)
    expected = logits_of(forward)
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    for step, logits in zip(steps(), expected, strict=True):
        forward.run(step)
        assert torch.equal(run_and_commit(forward, step), logits)


@pytest.mark.parametrize(
    ("quantization", "tolerance"), [("int8", QUANTIZED_TOLERANCE), ("int4-mixed", 0.9), ("int4", FOUR_BITS_TOLERANCE)]
)
@torch.inference_mode()
def test_weights_in_bytes_and_in_four_bits(quantization: str, tolerance: float) -> None:
    model = make_model("qwen3.5", torch.bfloat16)
    truth = ReferenceRun.of(model, 97)
    forward = native_forward("qwen3.5", torch.bfloat16, quantization)
    assert check_conformance(forward, truth, tolerance) > 0


def test_plans_of_recurrent_layers_are_read() -> None:
    qwen = read_decoder(make_model("qwen3.5", torch.float32), 64).layers
    delta, attention = qwen[0].attention, qwen[1].attention
    assert isinstance(delta, MixerPlan)
    assert (delta.kind, delta.num_heads, delta.num_groups, delta.key_dim) == (MixerKind.DELTA_RULE, 4, 2, 24)
    assert (delta.decay, delta.step_bias) == tuple(
        f"model.layers.0.linear_attn.{name}" for name in ("A_log", "dt_bias")
    )
    assert isinstance(attention, AttentionPlan)
    assert attention.gate is AttentionGate.WITH_QUERY
    gated = read_decoder(make_model("lfm3", torch.float32), 64).layers[1].attention
    assert isinstance(gated, AttentionPlan)
    assert gated.gate is AttentionGate.PER_HEAD
    scan = read_decoder(make_model("bamba", torch.float32), 64).layers[0].attention
    assert isinstance(scan, MixerPlan)
    assert (scan.kind, scan.num_groups, scan.gates_first, scan.skip) == (
        MixerKind.SCAN,
        2,
        True,
        "model.layers.0.mamba.D",
    )
    gate = read_decoder(make_model("lfm2", torch.float32), 64).layers[0].attention
    assert isinstance(gate, MixerPlan)
    assert (gate.kind, gate.gate_at) == (MixerKind.CONVOLUTION, 96)


def test_unknown_mixers_are_refused_by_name() -> None:
    model = make_model("lfm2", torch.float32)
    model.get_submodule("model.layers.2.conv.out_proj").register_forward_pre_hook(
        lambda module, inputs: (inputs[0].tanh(),)
    )
    with pytest.raises(ModelLoadError, match="the tokens of Lfm2ShortConv are not mixed in a known way"):
        LeanForward(model, SETTINGS)


def test_without_compiled_kernels_it_goes_another_way() -> None:
    native.unload()
    with pytest.raises(ModelLoadError, match="are mixed by compiled kernels alone"):
        LeanForward(make_model("qwen3.5", torch.float32), SETTINGS)


@pytest.mark.parametrize("variant", ["qwen3.5", "lfm2"])
@torch.inference_mode()
def test_adapters_give_the_same_result_in_compiled_and_lean_layers(variant: str) -> None:
    lean = LeanForward(make_model(variant, torch.float32), SETTINGS)
    compiled = native_forward(variant, torch.float32)
    names = layers_of(targets_of(compiled.network))
    if variant == "qwen3.5":
        assert names["model.layers.0.linear_attn.in_proj_a"] == (96, 4)
        assert names["model.layers.1.self_attn.q_proj"] == (96, 192)
    for ours, theirs in zip(adapted(compiled, names), adapted(lean, names), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def adapted(forward: Forward, names: dict[str, tuple[int, int]]) -> list[Tensor]:
    """Logits of ``steps`` with an adapter in every other token."""
    generator = torch.Generator().manual_seed(5)
    slots = attach_adapters(forward, "it", num_slots=1, max_rank=4, is_deterministic=False)
    matrices = {
        layer: LayerMatrices(
            torch.randn(4, num_inputs, generator=generator), 0.1 * torch.randn(num_outputs, 4, generator=generator)
        )
        for layer, (num_inputs, num_outputs) in sorted(names.items())
    }
    slots.assign(0, slots.prepare(matrices))
    slots.flush()
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    return [
        run_and_commit(forward, replace(step, token_lora=torch.arange(len(step.token_ids)) % 2 - 1)) for step in steps()
    ]
