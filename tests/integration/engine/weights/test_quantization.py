"""Weights in bytes or four bits, on request: near to what they were, and refused where they cannot be had."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from penstock.kernels import native
from penstock.ops.demo.task import demo_questions
from penstock.shared.errors import ConfigurationError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.execution.model_runner import ModelRunner
from penstock.worker.models.placing.device import check_float8

from ....conftest import DEMO_MODEL
from ..harness import generate, request

HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))

# Of the demo model in float32: four layers with 1,088 outputs in 17 / 32 of a byte and 576 in bytes, and an output
# layer of 384. All have 192 inputs; those with twice as many count twice.
MIXED_SHARE = (4 * 1088 * 17 / 32 + 4 * 576 + 384) / (4 * (4 * (1088 + 576) + 384))


def demo_core(**options: Any) -> EngineCore:
    config = EngineConfig(model=str(DEMO_MODEL), num_threads=1, kv_cache_memory=1 << 24, **options)
    return build_engine(config, DEMO_MODEL).core


def bytes_of_weights(core: EngineCore) -> int:
    runner = core._executor
    assert isinstance(runner, ModelRunner)
    packed = [vars(part).get("_packed") for part in runner._model.network.modules()]
    return sum(tensor.nbytes for tensor in packed if isinstance(tensor, torch.Tensor))


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize(("quantization", "share"), [("int8", 1 / 4), ("int4-mixed", MIXED_SHARE), ("int4", 17 / 128)])
def test_the_demo_model_still_answers_right_on_a_share_of_the_bytes(quantization: str, share: float) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    questions = demo_questions(60, seed=1)
    requests = [
        request(str(index), tokenizer.encode(question.prompt).ids, max_tokens=40, ignore_eos=False)
        for index, question in enumerate(questions)
    ]
    plain, quantized = demo_core(), demo_core(quantization=quantization)
    assert bytes_of_weights(quantized) == bytes_of_weights(plain) * share
    answers = generate(quantized, requests)
    right = [
        tokenizer.decode(answers[str(index)], skip_special_tokens=True).strip() == question.answer
        for index, question in enumerate(questions)
    ]
    assert sum(right) >= 0.9 * len(right)


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was_loaded = native.is_loaded()
    native.unload()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigurationError, match=r"quantization 'int8' needs the compiled kernels.*no-such-compiler"):
        demo_core(quantization="int8")
    monkeypatch.undo()
    if was_loaded:
        native.load()


def test_impossible_options_are_refused_before_loading() -> None:
    wrongs: tuple[dict[str, Any], ...] = ({"quantization": "int3"}, {"quantization": "int8", "native_kernels": False})
    for wrong in wrongs:
        with pytest.raises(ConfigurationError, match="quantization"):
            EngineConfig(model="any", **wrong)
    for device, quantization, needs in (
        ("cpu", "fp8", "a GPU"),
        ("cuda", "int4", "the CPU"),
        ("cuda", "int4-mixed", "the CPU"),
    ):
        with pytest.raises(ConfigurationError, match=f"needs {needs}"):
            EngineConfig(model="any", device=device, quantization=quantization)
    old = EngineConfig(model="any", device="cuda", quantization="fp8")
    check_float8(old, (8, 9))
    with pytest.raises(ConfigurationError, match=r"quantization 'fp8' needs compute capability 8\.9.*has 8\.0"):
        check_float8(old, (8, 0))
