"""How layers are made is read from a model's own forward; with every switch adapters and quantised weights work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.kernels import native
from penstock.shared.errors import ModelLoadError
from penstock.worker.models.adapters.attach import attach_adapters
from penstock.worker.models.adapters.peft_folder import LayerMatrices
from penstock.worker.models.adapters.targets import layers_of, placed_targets_of, targets_of
from penstock.worker.models.attention import call
from penstock.worker.models.checks.conformance import (
    QUANTIZED_TOLERANCE,
    ReferenceRun,
    check_conformance,
)
from penstock.worker.models.checks.lengths import LoweredReference
from penstock.worker.models.forward import Forward, ForwardSettings
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.lean.native import NativeForward, make_native
from penstock.worker.models.lean.reading.decoder import read_decoder
from penstock.worker.models.modes.packed import PackedForward
from penstock.worker.models.placing.packed_linear import pack_linear_layers
from penstock.worker.models.plan import AttentionPlan, LayerPlan

from ...native_library import native_as_before
from .lean_models import (
    ALL_EXPERTS,
    BLOCK_SIZE,
    MIXTURES,
    NUM_BLOCKS,
    SETTINGS,
    SWITCHES,
    make_model,
    run_and_commit,
    steps,
)


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    with native_as_before():
        native.load()
        yield


def layer_of(variant: str, index: int = 0) -> LayerPlan:
    return read_decoder(make_model(variant, torch.float32), 64).layers[index]


def attention_of(layer: LayerPlan) -> AttentionPlan:
    assert isinstance(layer.attention, AttentionPlan)
    return layer.attention


def test_norms_are_detected_in_every_position() -> None:
    gemma, olmo, cohere = layer_of("gemma2"), layer_of("olmo2"), layer_of("cohere")
    for norm in (gemma.input_norm, gemma.attention_norm, gemma.mlp_norm, gemma.mlp_out_norm):
        assert norm is not None
        assert (norm.offset, norm.is_centred) == (1.0, False)
    assert (olmo.input_norm, olmo.mlp_norm) == (None, None)
    assert olmo.attention_norm is not None
    assert olmo.mlp_out_norm is not None
    assert attention_of(olmo).norms_rows
    assert cohere.is_parallel
    assert cohere.mlp_norm is None
    assert cohere.input_norm is not None
    assert cohere.input_norm.is_centred
    assert attention_of(layer_of("hunyuan")).norms_follow


def test_rotations_are_detected_with_pairs_and_angles() -> None:
    plan = read_decoder(make_model("gemma3", torch.float32), 64)
    rotations = [attention_of(layer).rotation for layer in plan.layers]
    sources = [rotation.source for rotation in rotations if rotation is not None]
    assert len(set(sources)) == len(plan.layers) == 2
    assert {plan.angles[source].arguments for source in sources} == {("sliding_attention",), ("full_attention",)}
    rotated = [attention_of(layer).rotation for layer in read_decoder(make_model("smollm3", torch.float32), 64).layers]
    assert [rotation is None for rotation in rotated] == [False, True, False]
    glm = attention_of(layer_of("glm")).rotation
    assert glm is not None
    assert glm.is_interleaved


def test_numbers_are_exact() -> None:
    granite = read_decoder(make_model("granite", torch.bfloat16), 64)
    assert (granite.stream_scale, granite.logit_scale) == (3.0, 1 / 5.0)
    assert {layer.residual_scale for layer in granite.layers} == {0.3}
    assert {attention_of(layer).scale for layer in granite.layers} == {0.2}
    gemma = read_decoder(make_model("gemma2", torch.float32), 64)
    assert gemma.logit_softcap == 4.0
    assert attention_of(gemma.layers[0]).softcap == 3.0


def test_fused_projections_keep_their_names_for_adapters() -> None:
    names = set(layers_of(targets_of(LeanForward(make_model("phi3", torch.float32), SETTINGS).network)))
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert names == {f"model.layers.{index}.{part}" for index in range(3) for part in parts}


def test_experts_are_read_with_their_router() -> None:
    plans = {variant: layer_of(variant, -1).mlp for variant in MIXTURES}
    routed = {variant: mlp.experts for variant, mlp in plans.items() if mlp is not None and mlp.experts is not None}
    assert list(routed) == list(MIXTURES)
    glm, gpt, qwen = routed["glm4 moe"], routed["gpt oss"], routed["qwen2 moe"]
    assert (glm.router.scoring, glm.router.scale, glm.router.renormalizes) == ("sigmoid", 1.7, True)
    assert glm.router.choice_bias.endswith("e_score_correction_bias")
    assert (gpt.clamp, gpt.is_transposed, gpt.router.bias != "") == ((1.702, 7.0), True, True)
    assert (qwen.router.renormalizes, routed["mixtral"].router.renormalizes) == (False, True)
    assert qwen.shared_gate.endswith("shared_expert_gate")
    assert [mixture for mixture, plan in routed.items() if plan.shared is not None] == [
        *("qwen2 moe", "glm4 moe", "granite moe, shared", "gemma4, with experts")
    ]


def test_experts_that_normalise_the_stream_for_themselves_are_read() -> None:
    mlp = layer_of("gemma4, with experts").mlp
    assert mlp is not None
    assert mlp.experts is not None
    experts, router = mlp.experts, mlp.experts.router
    norms = (experts.input_norm, experts.out_norm, experts.shared_norm, router.norm)
    assert [norm.name.partition("layers.0.")[2] for norm in norms if norm is not None] == [
        *("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1", "router.norm")
    ]
    assert (router.input_scale, router.input_factor) == ("model.layers.0.router.scale", 96**-0.5)
    assert (router.expert_scale, router.renormalizes) == ("model.layers.0.router.per_expert_scale", True)
    assert experts.shared is not None


def test_layers_with_a_shared_cache_are_detected() -> None:
    plan = read_decoder(make_model("gemma4", torch.float32), 64)
    attentions = [attention_of(layer) for layer in plan.layers]
    assert [attention.source for attention in attentions] == [None] * 4 + [3, 1]
    assert [attention.head_dim for attention in attentions] == [16, 32, 16, 16, 16, 32]
    assert [attention.value_norm is None for attention in attentions] == [False] * 4 + [True] * 2
    assert [len(attention.qkv) for attention in attentions] == [3] * 4 + [1] * 2
    assert LeanForward(make_model("gemma4", torch.float32), SETTINGS).windows == [5, None, 5, 5, 5, None]


def test_a_layer_with_a_wider_window_than_its_shared_cache_is_refused() -> None:
    """Blocks outside the window of the storing layer may have been freed."""
    model = make_model("gemma4", torch.float32, global_head_dim=16)
    kinds = list(model.config.layer_types)
    model.config.layer_types = [
        *kinds[:4],
        "full_attention",
        kinds[5],
    ]  # for masks and angles; keys are those of layer 3
    with pytest.raises(ModelLoadError, match="sees further than that"):
        LeanForward(model, SETTINGS)


def test_embeddings_of_layers_are_read_with_their_numbers() -> None:
    plan = read_decoder(make_model("gemma4", torch.bfloat16), 64)
    of_layers = plan.layer_embeddings
    assert of_layers is not None
    assert (of_layers.size, of_layers.embedding_scale) == (16, 4.0)
    assert of_layers.projection_scale == 96**-0.5
    assert of_layers.sum_scale == 2**-0.5
    assert [layer.out_scale for layer in plan.layers] == [f"model.layers.{index}.layer_scalar" for index in range(6)]
    part = plan.layers[0].embedding_part
    assert part is not None
    assert (part.gate.rpartition(".")[2], part.activation) == ("per_layer_input_gate", "gelu_tanh")
    assert part.norm is not None


def test_keys_that_serve_as_values_are_detected() -> None:
    window, full = (attention_of(layer_of("gemma4, whose keys are values", index)) for index in range(2))
    assert (window.values_are_keys, full.values_are_keys) == (False, True)
    assert (full.num_kv_heads, len(full.qkv)) == (3, 2)


class Late(nn.Module):
    """Changes queries from some position on, which the model's first tokens do not show."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, position_ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner(hidden, position_ids, **options)
        late = torch.where(position_ids[..., None] >= 40, 2.0, 1.0).to(cos.dtype)
        return cos * late, sin


def test_differences_only_in_late_tokens_are_detected() -> None:
    model = make_model("llama", torch.float32)
    model.model.rotary_emb = Late(model.model.rotary_emb)
    with pytest.raises(ModelLoadError, match="more to queries and keys than normalise and rotate"):
        LeanForward(model, SETTINGS)


def test_angles_that_follow_the_batch_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = make_model("llama", torch.float32, rope_parameters=rope, max_position_embeddings=16)
    assert LeanForward(model, ForwardSettings(max_model_len=16)).mode == "lean"
    with pytest.raises(ModelLoadError, match="follow the longest request"):
        LeanForward(model, SETTINGS)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("self_attn", "more than one projection behind its attention"),
        ("input_layernorm", "not one part, but input_layernorm, mlp"),
        ("", "the result of model.layers.1"),
    ],
)
def test_unsupported_layer_parts_are_refused_by_name(part: str, said: str) -> None:
    model = make_model("llama", torch.float32)

    def change(module: nn.Module, inputs: Any, result: Any) -> Any:
        return (result[0].tanh(), *result[1:]) if isinstance(result, tuple) else result.tanh()

    model.get_submodule(f"model.layers.1.{part}".rstrip(".")).register_forward_hook(change)
    with pytest.raises(ModelLoadError, match=said):
        LeanForward(model, SETTINGS)


def adapted(forward: Forward, names: dict[str, tuple[int, int]]) -> list[Tensor]:
    """Logits of ``steps`` with two adapters in turn and none."""
    generator = torch.Generator().manual_seed(5)
    slots = attach_adapters(forward, "it", num_slots=2, max_rank=4, is_deterministic=False)
    for slot in range(2):
        matrices = {
            layer: LayerMatrices(
                torch.randn(4, num_inputs, generator=generator), 0.1 * torch.randn(num_outputs, 4, generator=generator)
            )
            for layer, (num_inputs, num_outputs) in sorted(names.items())
        }
        slots.assign(slot, slots.prepare(matrices))
    slots.flush()
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    with_adapters = [replace(step, token_lora=torch.arange(len(step.token_ids)) % 3 - 1) for step in steps()]
    return [run_and_commit(forward, step) for step in with_adapters]


@pytest.mark.parametrize("variant", [*SWITCHES, "qwen2 moe"])
@torch.inference_mode()
def test_adapters_give_the_same_result_as_the_general_forward(variant: str) -> None:
    packed = PackedForward(make_model(variant, torch.float32), SETTINGS)
    lean = LeanForward(make_model(variant, torch.float32), SETTINGS)
    pack_linear_layers(lean.network)
    forward = make_native(lean, BLOCK_SIZE)
    assert isinstance(forward, NativeForward)
    names = layers_of(placed_targets_of(forward.network).values())
    for ours, theirs in zip(adapted(forward, names), adapted(packed, names), strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_adapters_of_layers_of_one_part() -> None:
    python, compiled = (LeanForward(make_model("nemotron hybrid", torch.float32), SETTINGS) for _ in range(2))
    for lean in (python, compiled):
        pack_linear_layers(lean.network)
    forward = make_native(compiled, BLOCK_SIZE)
    assert isinstance(forward, NativeForward)
    names = layers_of(placed_targets_of(forward.network).values())
    for ours, theirs in zip(adapted(forward, names), adapted(python, names), strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", SWITCHES)
# In four bits, the few tokens of one kind have errors of up to 0.93 in these tiny random models; those of a different
# model would have 1.4.
@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", QUANTIZED_TOLERANCE), ("int4", 1.1)])
@torch.inference_mode()
def test_weights_in_bytes_and_in_four_bits(variant: str, quantization: str, tolerance: float) -> None:
    model = make_model(variant, torch.bfloat16, **(ALL_EXPERTS if variant in MIXTURES else {}))
    truth = ReferenceRun.of(model, 97)
    lean = LeanForward(model, SETTINGS)
    pack_linear_layers(lean.network, quantization)
    forward = make_native(lean, BLOCK_SIZE)
    assert isinstance(forward, NativeForward)
    assert check_conformance(forward, truth, tolerance) > 0


@pytest.mark.parametrize("variant", ["mistral, with a window", "gemma3", "gpt oss", "gemma4"])
@torch.inference_mode()
def test_conformance_runs_past_windows(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of any size are narrowed, because sequences of 7 tokens hardly reach a window of 5."""
    model = make_model(variant, torch.float32, sliding_window=50)
    truth = ReferenceRun.of(model, 97)
    narrow = LoweredReference.of(model, 97, SETTINGS)
    assert narrow is not None
    assert narrow.windows is not None
    assert set(narrow.windows) - {None} == {3}
    assert model.config.sliding_window == 50
    lean = LeanForward(model, SETTINGS)
    wide = lean.windows
    assert set(wide) - {None} == {50}
    pack_linear_layers(lean.network)
    forward = make_native(lean, BLOCK_SIZE)
    for one in (lean, forward):
        check_conformance(one, truth)
        narrow.check(one)
        assert lean.windows == wide
    own = call.paged_attention

    def without_window(*arguments: Any, window: int | None = None, **options: Any) -> Tensor:
        return own(*arguments, **options)

    monkeypatch.setattr(call, "paged_attention", without_window)
    check_conformance(lean, truth)
    with pytest.raises(ModelLoadError, match="beyond 50 tokens"):
        narrow.check(lean)


@torch.inference_mode()
def test_a_compiled_decoder_gets_its_windows_back() -> None:
    model = make_model("gemma3", torch.float32, sliding_window=50)
    narrow = LoweredReference.of(model, 97, SETTINGS)
    assert narrow is not None
    lean = LeanForward(model, SETTINGS)
    pack_linear_layers(lean.network)
    forward = make_native(lean, BLOCK_SIZE)
    before = run(forward)
    narrow.check(forward)
    assert all(map(torch.equal, run(forward), before))


def run(forward: Forward) -> list[Tensor]:
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    return [forward.run(step) for step in steps()]
