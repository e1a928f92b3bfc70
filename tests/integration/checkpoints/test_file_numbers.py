"""Models that compute with the numbers of their quantized file as they are."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.kernels.linear import pack_blocks, unpack_weight
from penstock.shared.errors import ModelLoadError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.checkpoint.quantized import open_tensors
from penstock.worker.models.checks.conformance import QUANTIZED_TOLERANCE
from penstock.worker.models.formats.tensors import Unpacked
from penstock.worker.models.gguf import tensors
from penstock.worker.models.gguf.blocks import has_parts, read_blocks
from penstock.worker.models.gguf.container import TYPES
from penstock.worker.models.gguf.families import Family, Place
from penstock.worker.models.gguf.folder import gguf_folder
from penstock.worker.models.gguf.sizes import NUMBER_BITS
from penstock.worker.models.gguf.tensors import read_gguf
from penstock.worker.models.lean.native import NativeForward, weights_of
from penstock.worker.models.loaded import LoadedModel
from penstock.worker.models.loading.calibration import run_prompts
from penstock.worker.models.loading.loader import load_model, load_weights
from penstock.worker.models.loading.preparing import prepared_tolerance
from penstock.worker.models.loading.stored import load_stored
from penstock.worker.models.placing.packed_linear import OwnPackedLinear
from penstock.worker.models.pooling.compiled_encoder import CompiledEncoder
from penstock.worker.models.weights.movable import ModelWeights

from .conftest import SHAPE, MakePair, save_model
from .gguf_converter import drawn_model as converted_model
from .gguf_converter import write_converted
from .gguf_models import drawn_model, write_model
from .gguf_writer import KINDS
from .packing import Format, awq, gptq, packed_ints

pytestmark = pytest.mark.usefixtures("compiled")

# Groups of up to 128 inputs fit.
WIDE = transformers.LlamaConfig(**{**SHAPE, "hidden_size": 128, "intermediate_size": 256})
# Checkpoints of integers, and the bits that a weight takes in memory.
INTEGERS = {
    "gptq of 32": (gptq(symmetric=True), 4.5),
    "gptq of 64": (gptq(symmetric=True, group=64), 4.5),
    "gptq of 128, second version": (gptq(symmetric=True, second=True, group=128), 4.5),
    "gptq of 128, zero points": (gptq(group=128), 5.0),
    "gptq of 16": (gptq(symmetric=True, group=16), 5.0),
    "gptq, 2 bits": (gptq(2, symmetric=True), 4.5),
    "gptq, 8 bits": (gptq(8, symmetric=True), 8.5),
    "gptq, 8 bits, zero points": (gptq(8), 9.0),
    "awq": (awq(128), 5.0),
    "compressed-tensors": (packed_ints(group=128), 4.5),
    "compressed-tensors, zero points": (packed_ints(symmetric=False), 5.0),
    "compressed-tensors, a scale per row": (packed_ints(8, group=None), 8.5),
}
CONFIG = transformers.LlamaConfig(**{**SHAPE, "hidden_size": 256, "intermediate_size": 256})
# Scales and minimums that are products of two numbers are rounded to float16.
ROUNDING = 2**-10


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with matrices of all types."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = save_model(CONFIG, tmp_path / "source")
    drawn = drawn_model(load_file(source / "model.safetensors"), CONFIG, KINDS)
    return write_model(tmp_path / "model.gguf", CONFIG, "llama", drawn)


def load(path: Path, dtype: str = "auto") -> LoadedModel:
    config = EngineConfig(model=str(path), dtype=dtype, max_model_len=64)
    return load_model(config, gguf_folder(path, path.parent / "cache"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(WIDE, tmp_path_factory.mktemp("wide"))


def packed_layers(model: LoadedModel) -> list[OwnPackedLinear]:
    return [each for each in model.network.modules() if isinstance(each, OwnPackedLinear)]


def test_weights_are_those_of_the_file(path: Path) -> None:
    """The file has queries and keys in another order."""
    num_read = 0
    for name, tensor in read_gguf(path, torch.float32).items():
        blocks = None if tensor.blocks is None else tensor.blocks()
        if blocks is None:
            continue
        expected: Tensor = tensor[...]
        actual = unpack_weight(pack_blocks([blocks]))
        assert (actual - expected).abs().max() <= ROUNDING * expected.abs().max(), name
        num_read += 1
    assert num_read >= 10


def test_the_order_of_rows_is_computed_once_for_all_layers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[tuple[str, Tensor]] = []

    def compute_and_record(family: Family, place: Place, shape: tuple[int, ...], is_transposed: bool) -> Tensor | None:
        outputs = outputs_of(family, place, shape, is_transposed)
        if outputs is not None and place.view is not None:
            orders.append((place.name, outputs))
        return outputs

    outputs_of = tensors._outputs_of
    monkeypatch.setattr(tensors, "_outputs_of", compute_and_record)
    for tensor in read_gguf(path, torch.float32).values():
        if tensor.blocks is not None:
            tensor.blocks()
    assert sorted(name for name, _ in orders) == ["self_attn.k_proj", "self_attn.q_proj"]
    assert all(order.untyped_storage().nbytes() == order.nbytes for _, order in orders)


def test_a_scale_that_is_no_number_is_left_to_the_check_of_loaded_weights() -> None:
    assert read_blocks("Q8_0", torch.full((1, 34), 255, dtype=torch.uint8), 1) is None


def test_layers_use_the_numbers_of_the_file_unless_a_dtype_is_requested(path: Path) -> None:
    model, widened = load(path), load(path, "bfloat16")
    assert (model.quantization, widened.quantization) == ("gguf", None)
    layers = packed_layers(model)
    assert isinstance(model.forward, NativeForward)
    # KINDS has float16 and bfloat16, too, so a few layers have none.
    assert sum(layer.has_file_numbers for layer in layers) >= len(layers) / 2
    for layer, plain in zip(layers, packed_layers(widened), strict=True):
        torch.testing.assert_close(layer.weight, plain.weight, rtol=2**-7, atol=1e-3)


def test_only_layers_with_numbers_of_a_file_have_the_tolerance_of_bytes(path: Path) -> None:
    config = EngineConfig(model=str(path), max_model_len=64)
    assert prepared_tolerance(config, load(path).network) == QUANTIZED_TOLERANCE
    assert prepared_tolerance(config, load(path, "bfloat16").network) is None


def test_a_stored_model_has_the_same_layers(path: Path) -> None:
    first = load(path)
    config = EngineConfig(model=str(path), max_model_len=64)
    again = load_stored(config, gguf_folder(path, path.parent / "cache"))
    assert again is not None
    assert again.quantization == "gguf"
    pairs = list(zip(packed_layers(first), packed_layers(again), strict=True))
    assert all(torch.equal(one.packed_weight.packed, other.packed_weight.packed) for one, other in pairs)
    # Both have their embeddings in the stored file, whose unused pages take no memory.
    (stored,) = (path.parent / "cache").rglob("*.weights")
    embeddings = [model.network.get_parameter("embed_tokens.weight") for model in (first, again)]
    assert torch.equal(embeddings[0], embeddings[1])
    assert [each.untyped_storage().nbytes() for each in embeddings] == [stored.stat().st_size] * 2


def test_weights_that_were_unloaded_come_back(path: Path) -> None:
    model = load(path)
    config = EngineConfig(model=str(path), max_model_len=64)
    folder = gguf_folder(path, path.parent / "cache")
    before = [layer.packed_weight.packed.clone() for layer in packed_layers(model)]
    weights = ModelWeights(model.network, lambda: load_weights(config, folder, model))
    weights.release(2)
    weights.restore()
    after = [layer.packed_weight.packed for layer in packed_layers(model)]
    assert all(map(torch.equal, before, after))
    assert np.prod(before[0].shape) > 0


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_a_checkpoint_are_used_in_their_size(make_pair: MakePair, wide: Path, name: str) -> None:
    """The weights are those that were drawn, but for scales and minimums that are rounded to float16."""
    packing, num_bits = INTEGERS[name]
    packed, plain = make_pair(packing, wide)
    expected = load_file(plain / "model.safetensors")
    num_read = 0
    for layer, tensor in open_tensors(packed, torch.float32).items():
        blocks = tensor.blocks() if isinstance(tensor, Unpacked) and tensor.blocks is not None else None
        if blocks is None:
            continue
        weight = pack_blocks([blocks])
        error = (unpack_weight(weight) - expected[layer]).abs().max()
        assert error <= 2**-9 * expected[layer].abs().max(), layer
        assert 8 * weight.packed.nbytes == num_bits * weight.packed.shape[0] * 64 * weight.num_inputs
        num_read += 1
    assert num_read == 13


@pytest.mark.parametrize("packing", [gptq(symmetric=True, order=True), gptq(group=8)])
def test_groups_that_are_no_blocks_are_widened(make_pair: MakePair, wide: Path, packing: Format) -> None:
    packed, _ = make_pair(packing, wide)
    model = load_model(EngineConfig(model=str(packed), max_model_len=64), packed)
    assert model.quantization is None
    assert not any(layer.has_file_numbers for layer in packed_layers(model))


def test_scales_beyond_float16_are_widened(make_pair: MakePair, wide: Path) -> None:
    packed, _ = make_pair(gptq(symmetric=True), wide)
    tensors = load_file(packed / "model.safetensors")
    scales = "model.layers.0.self_attn.q_proj.scales"
    save_file({**tensors, scales: tensors[scales].float() * 2**21}, packed / "model.safetensors")
    weight: Unpacked = open_tensors(packed, torch.float32)["model.layers.0.self_attn.q_proj.weight"]
    assert weight.blocks is not None
    assert weight.blocks() is None


@pytest.mark.parametrize(("declared", "computed"), [("float32", torch.float32), ("float16", torch.bfloat16)])
def test_a_gptq_checkpoint_is_computed_with_its_integers(
    make_pair: MakePair, wide: Path, declared: str, computed: torch.dtype
) -> None:
    """The kernels do not compute in float16, in which most of these checkpoints are declared."""
    packed, _ = make_pair(gptq(group=128), wide)
    fields = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**fields, "dtype": declared}))
    config = EngineConfig(model=str(packed), max_model_len=64)
    first = load_model(config, packed)
    again = load_stored(config, packed)
    assert again is not None
    for model in (first, again):
        assert (model.quantization, model.dtype) == ("gptq", computed)
        assert isinstance(model.forward, NativeForward)
        assert any(layer.has_file_numbers for layer in packed_layers(model))
    assert load_model(EngineConfig(model=str(packed), dtype=declared, max_model_len=64), packed).quantization is None


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_an_encoder_computes_with_the_numbers_of_its_file(model_type: str, kind: str, tmp_path: Path) -> None:
    path = write_converted(tmp_path / "model.gguf", converted_model(model_type), model_type, kind)
    model, widened = load(path), load(path, "bfloat16")
    assert (model.quantization, widened.quantization) == ("gguf", None)
    assert isinstance(model.forward, CompiledEncoder)
    for layer, plain in zip(packed_layers(model), packed_layers(widened), strict=True):
        assert layer.has_file_numbers
        torch.testing.assert_close(layer.weight, plain.weight, rtol=2**-7, atol=1e-3)


def test_an_encoder_that_rounding_changes_says_so(tmp_path: Path) -> None:
    """Large random weights make attention so sharp that rounding moves it. In a third of their size they do not.

    In Q8_0 they bear bfloat16, but not inputs in bytes.
    """
    drawn = converted_model("nomic_bert")
    rounds = r"rounding to bfloat16 moves its hidden states by .*; use --dtype float32"
    in_bytes = (
        r"with its file's numbers and inputs in bytes: hidden states .* differ by .* from the model's own, "
        r"and rounding to bfloat16 alone moves them by .*; use --dtype float32"
    )
    for kind, message in (("Q4_1", rounds), ("Q8_0", in_bytes)):
        sharp = write_converted(tmp_path / f"{kind}.gguf", drawn, "nomic_bert", kind)
        with pytest.raises(ModelLoadError, match=message):
            load(sharp)
        assert load(sharp, "float32").quantization is None
    with torch.no_grad():
        for name, weight in drawn.named_parameters():
            if weight.dim() > 1 and ".layers." in f".{name}":
                weight *= 0.33
    assert load(write_converted(tmp_path / "soft.gguf", drawn, "nomic_bert", "Q4_1")).quantization == "gguf"


def test_an_encoder_may_differ_by_twice_what_rounding_moves(tmp_path: Path) -> None:
    path = write_converted(tmp_path / "model.gguf", converted_model("nomic_bert"), "nomic_bert", "Q8_0")
    assert load(path, "bfloat16").quantization is None


EXPERTS = {**SHAPE, "hidden_size": 64, "intermediate_size": 64, "num_experts_per_tok": 2}
MIXTURES = {
    "llama": transformers.MixtralConfig(**EXPERTS, num_local_experts=4),
    "qwen3moe": transformers.Qwen3MoeConfig(
        **{**EXPERTS, "head_dim": 32}, num_experts=4, moe_intermediate_size=64, norm_topk_prob=True
    ),
}


@pytest.mark.parametrize("key", MIXTURES)
def test_experts_compute_with_the_numbers_of_their_file(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = MIXTURES[key]
    state = load_file(save_model(config, tmp_path / "source") / "model.safetensors")
    path = write_model(tmp_path / "model.gguf", config, key, drawn_model(state, config, ("Q8_0", "Q4_1", "Q5_0")))
    model, widened = load(path), load(path, "bfloat16")
    assert isinstance(model.forward, NativeForward)
    experts = [name for name, _ in model.network.named_modules() if re.search(r"\.(gate_up|down)\.\d+$", name)]
    assert len(experts) == 2 * 4 * config.num_hidden_layers
    for name in experts:
        layer, plain = model.network.get_submodule(name), widened.network.get_submodule(name)
        assert isinstance(layer, OwnPackedLinear)
        assert isinstance(plain, OwnPackedLinear)
        assert layer.has_file_numbers, name
        torch.testing.assert_close(layer.weight, plain.weight, rtol=2**-7, atol=1e-3)


# KL divergence from the widened model, as a share of that from a uniform distribution. These have up to 0.08, as inputs
# in bytes send tokens to other experts, and predictions for other tokens have 2.
MIXTURE_KL = 0.2
# Of each the prediction of 24 tokens counts.
MIXTURE_PROMPTS = [[3 + (7919 * (1 + place) + 31 * number) % 120 for place in range(24)] for number in range(4)]


def assert_predicts_alike(model: LoadedModel, widened: LoadedModel) -> None:
    """The most probable tokens of random weights differ by chance, so probabilities are compared."""
    actual, expected = (run_prompts(one.forward, MIXTURE_PROMPTS).float().log_softmax(-1) for one in (model, widened))
    from_uniform = math.log(expected.shape[-1]) + (expected.exp() * expected).sum(-1).mean()
    assert 0 <= (expected.exp() * (expected - actual)).sum(-1).mean() < MIXTURE_KL * from_uniform


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "MXFP4"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma4_text mixture", "granitemoe", "minimax_m2"])
def test_experts_in_one_stack_compute_with_the_numbers_of_their_file(
    model_type: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacks have rows of gate and up in turn and transposed (gpt-oss), as halves, or as the file does (Gemma 4).

    A second start takes the numbers, too, but for Granite, whose tensors transformers renames.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_converted(tmp_path / "model.gguf", converted_model(model_type), model_type, kind)
    model, widened = load(path), load(path, "bfloat16")
    assert isinstance(model.forward, NativeForward)
    experts = [name for name, _ in model.network.named_modules() if re.search(r"\.(gate_up|down)\.\d+$", name)]
    assert len(experts) >= 2 * 4
    config = EngineConfig(model=str(path), max_model_len=64)
    again = load_stored(config, gguf_folder(path, path.parent / "cache"))
    assert (again is None) == (model_type == "granitemoe")
    for name in experts:
        layer, plain = model.network.get_submodule(name), widened.network.get_submodule(name)
        assert isinstance(layer, OwnPackedLinear)
        assert layer.has_file_numbers, name
        if again is not None:
            same = again.network.get_submodule(name)
            assert isinstance(same, OwnPackedLinear)
            assert torch.equal(same.packed_weight.packed, layer.packed_weight.packed)
        torch.testing.assert_close(layer.weight, plain.weight, rtol=2**-7, atol=1e-3)
    assert_predicts_alike(model, widened)


@pytest.mark.parametrize("ties", [True, False])
def test_only_a_tied_output_layer_is_read_for_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ties: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tied = transformers.LlamaConfig(**{**SHAPE, "tie_word_embeddings": ties})
    source = save_model(tied, tmp_path / "source")
    drawn = drawn_model(load_file(source / "model.safetensors"), tied, ("Q8_0",))
    path = write_model(tmp_path / "model.gguf", tied, "llama", drawn)
    first = load(path)
    config = EngineConfig(model=str(path), max_model_len=64)
    again = load_stored(config, gguf_folder(path, path.parent / "cache"))
    assert again is not None
    for model in (first, again):
        assert isinstance(model.forward, NativeForward)
        assert weights_of(model.forward.lean).embeds_by_head is ties


def test_the_bits_of_packed_numbers_are_known_before_a_file_is_loaded() -> None:
    bits = {}
    for kind in TYPES.values():
        if has_parts(kind.name):
            blocks = read_blocks(kind.name, torch.zeros(1, kind.num_bytes, dtype=torch.uint8), 1)
            assert blocks is not None
            bits[kind.name] = 8 * blocks.form.num_bytes(1) / blocks.form.num_inputs
    assert bits == NUMBER_BITS
