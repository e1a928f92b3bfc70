"""Models that compute with the numbers of their quantized file as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.linear import pack_blocks, unpack_weight
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.checks.conformance import QUANTIZED_TOLERANCE
from penstock.worker.models.gguf.blocks import read_blocks
from penstock.worker.models.gguf.folder import gguf_folder
from penstock.worker.models.gguf.tensors import read_gguf
from penstock.worker.models.lean.native import NativeForward
from penstock.worker.models.loaded import LoadedModel
from penstock.worker.models.loading.loader import load_model, load_weights
from penstock.worker.models.loading.preparing import prepared_tolerance
from penstock.worker.models.loading.stored import load_stored
from penstock.worker.models.placing.packed_linear import OwnPackedLinear
from penstock.worker.models.weights.movable import ModelWeights

from ...native_library import native_as_before
from .conftest import SHAPE, save_model
from .gguf_models import drawn_model, write_model
from .gguf_writer import KINDS

CONFIG = transformers.LlamaConfig(**{**SHAPE, "hidden_size": 256, "intermediate_size": 256})
# Scales and minimums that are products of two numbers are rounded to float16.
ROUNDING = 2**-10


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    with native_as_before():
        if (reason := native.load()) is not None:
            pytest.skip(reason)
        yield


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
