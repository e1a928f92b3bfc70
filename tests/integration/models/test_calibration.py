"""Linear layers in four bits that are packed by the inputs that prompts give them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.shared.control.model import ReloadWeights, WeightsReloaded
from penstock.shared.messages.core import UtilityCall
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.loading import calibration
from penstock.worker.models.loading.calibration import TextEncoder, calibration_prompts, pack_by_examples
from penstock.worker.models.loading.text_check import check_prompt
from penstock.worker.models.placing.packed_linear import (
    MIN_QUANTIZED_OUTPUTS,
    OwnPackedLinear,
    linear_layers_of,
    pack_linear_layers,
)
from penstock.worker.processes.progress import Phase, ProgressWriter

from ...conftest import DEMO_MODEL
from .lean_models import (
    ALL_EXPERTS,
    BLOCK_SIZE,
    MIXTURES,
    NUM_BLOCKS,
    SETTINGS,
    make_model,
    run_and_commit,
    steps,
)

pytestmark = pytest.mark.usefixtures("compiled")

# So that the output layer is large enough to be packed.
_WIDE = {"vocab_size": 128, "vocab_size_per_layer_input": 128}
PROMPTS = [torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(8)]


def logits_of(lean: LeanForward) -> torch.Tensor:
    lean.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    return torch.cat([run_and_commit(lean, step).float() for step in steps()])


@pytest.mark.parametrize("variant", ["gemma2", "mixtral", "gemma4"])
@torch.inference_mode()
def test_examples_lower_the_error_of_logits(variant: str) -> None:
    changed = ALL_EXPERTS if variant in MIXTURES else {}
    # In float32, so that the error is that of four bits; bfloat16 adds its own, other ones on each processor.
    plain, rounded, fed = (LeanForward(make_model(variant, torch.float32, **changed), SETTINGS) for _ in range(3))
    packed: list[int] = []
    pack_by_examples(fed, PROMPTS, report=lambda: packed.append(1))
    types = {type(module) for module in fed.network.modules() if isinstance(module, (nn.Linear, OwnPackedLinear))}
    assert OwnPackedLinear in types
    assert len(packed) == sum(isinstance(module, OwnPackedLinear) for module in fed.network.modules())
    for lean in (rounded, fed):
        pack_linear_layers(lean.network, "int4")
        assert not any(isinstance(module, nn.Linear) for module in lean.network.modules())
    expected = logits_of(plain)
    assert (logits_of(fed) - expected).norm() < 0.9 * (logits_of(rounded) - expected).norm()


@pytest.mark.parametrize("variant", ["llama", "gpt oss", "gemma4", "bamba"])
@torch.inference_mode()
def test_mixed_keeps_the_layers_out_of_a_part_in_bytes(variant: str) -> None:
    changed = ALL_EXPERTS if variant in MIXTURES else {}
    lean = LeanForward(make_model(variant, torch.bfloat16, **_WIDE, **changed), SETTINGS)
    sensitive = ("lm_head", "o_proj", "down_proj", "down", "embedding_part.output")
    paths = {path for path, _ in linear_layers_of(lean.network)}
    in_bytes = {path for path in paths if path.rstrip(".0123456789").endswith(sensitive)}
    pack_by_examples(lean, PROMPTS, "int4-mixed")
    # The examples end at the output layer, so logits of all tokens are never in memory.
    assert isinstance(lean.network.lm_head, nn.Linear)
    pack_linear_layers(lean.network, "int4-mixed")
    packed: dict[str, Any] = {path: lean.network.get_submodule(path) for path in paths}
    large = {path: layer for path, layer in packed.items() if layer.out_features >= MIN_QUANTIZED_OUTPUTS}
    in_nibbles = {path: layer.packed_weight.is_in_nibbles for path, layer in large.items()}
    assert in_nibbles == {path: path not in in_bytes for path in large}


@torch.inference_mode()
def test_a_failed_step_leaves_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    lean = LeanForward(make_model("gemma2", torch.bfloat16), SETTINGS)
    expected = logits_of(lean)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lean.network, "run_layers", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        pack_by_examples(lean, PROMPTS)
    monkeypatch.undo()
    assert torch.equal(logits_of(lean), expected)


def test_prompts_are_known_tokens_within_the_models_length() -> None:
    config = EngineConfig(model=str(DEMO_MODEL), quantization="int4")
    prompts = calibration_prompts(TextEncoder(Path(DEMO_MODEL), config, 90), config, 32)
    assert {len(prompt) for prompt in prompts} == {32}
    assert all(0 <= token_id < 90 for prompt in prompts for token_id in prompt)
    other = EngineConfig(model="any", quantization="int8")
    assert calibration_prompts(TextEncoder(Path("any"), other, 90), other, 32) == []


def test_the_tokenizer_is_read_once_for_all_texts_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    def count(folder: Path, trust_remote_code: bool) -> Path:
        nonlocal num_read
        num_read += 1
        return folder

    monkeypatch.setattr(calibration, "tokenizer_folder", count)
    config = EngineConfig(model=str(DEMO_MODEL), quantization="int4")
    encoder = TextEncoder(Path(DEMO_MODEL), config, 90)
    assert calibration_prompts(encoder, config, 32)
    assert check_prompt(encoder, config, 32)
    assert num_read == 1


class CountedProgress(ProgressWriter):
    """Progress that counts how often the core has reported that it starts."""

    num_starts = num_reports = 0

    def enter(self, phase: Phase) -> None:
        self.num_starts += phase is Phase.STARTING
        self.num_reports += 1
        super().enter(phase)


@pytest.mark.usefixtures("compiled", "own_cache")
@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_a_starting_core_reports_each_packed_layer(runner: str) -> None:
    plain, packed = CountedProgress(), CountedProgress()
    for progress, quantization in ((plain, None), (packed, "int4")):
        config = EngineConfig(model=str(DEMO_MODEL), runner=runner, quantization=quantization, kv_cache_memory=1 << 24)
        build_engine(config, Path(DEMO_MODEL), progress)
    assert packed.num_starts > plain.num_starts + 4


@pytest.mark.usefixtures("compiled", "own_cache")
def test_a_core_that_reloads_weights_reports_each_packed_layer(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(DEMO_MODEL, copy)
    progress = CountedProgress()
    config = EngineConfig(model=str(DEMO_MODEL), quantization="int4", kv_cache_memory=1 << 24)
    engine = build_engine(config, Path(DEMO_MODEL), progress)
    before = progress.num_reports
    output = engine.control.answer(UtilityCall(0, ReloadWeights(path=str(copy))))
    assert output is not None
    assert isinstance(output.answer, WeightsReloaded)
    assert progress.num_reports > before + 4
