"""Which kernel attends, and keys and values in eight bits: by option, checked at the start, and said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from penstock.ops.demo.task import demo_questions
from penstock.shared.errors import ConfigurationError, ModelLoadError
from penstock.worker.cli.plan import describe_choices
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine
from penstock.worker.models.forward import ForwardSettings
from penstock.worker.models.lean.native import NativeForward
from penstock.worker.models.loading.loader import load_model
from penstock.worker.models.loading.preparing import use_eight_bit_cache
from penstock.worker.models.modes.cached import gather_forward
from penstock.worker.models.modes.partition import CutRule
from penstock.worker.models.placing.device import check_float8

from ...conftest import DEMO_MODEL
from .harness import SHAPE, generate, request
from .weights.test_quantization import HAS_COMPILER

KV_CACHE_BYTES = 1 << 20


def demo_engine(**options: Any) -> Engine:
    config = EngineConfig(model=str(DEMO_MODEL), num_threads=1, kv_cache_memory=KV_CACHE_BYTES, **options)
    return build_engine(config, DEMO_MODEL)


def share_of_right_answers(engine: Engine) -> float:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    questions = demo_questions(30, seed=1)
    answers = generate(
        engine.core,
        [
            request(str(index), tokenizer.encode(question.prompt).ids, max_tokens=40, ignore_eos=False)
            for index, question in enumerate(questions)
        ],
    )
    texts = [tokenizer.decode(answers[str(index)], skip_special_tokens=True).strip() for index in range(len(questions))]
    return sum(text == question.answer for text, question in zip(texts, questions, strict=True)) / len(questions)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "options", "name", "least", "times"),
    [
        ("int8", {}, "int8", 0.95, 128 / 34),
        ("int8", {"deterministic": True}, "int8", 0.95, 128 / 34),
        ("int8", {"native_kernels": False}, "int8", 0.95, 128 / 34),
        ("fp8", {}, "fp8_e4m3", 0.95, 4),
        ("fp8_e5m2", {}, "fp8_e5m2", 0.85, 4),
        ("fp8_e4m3", {"deterministic": True}, "fp8_e4m3", 0.95, 4),
    ],
)
def test_the_demo_model_still_answers_right_with_a_quarter_of_the_cache(
    kv_cache_dtype: str, options: dict[str, Any], name: str, least: float, times: float
) -> None:
    """32 dimensions have 128 bytes in float32, 32 in float8, and 34 in int8 with their scale."""
    plain = demo_engine(max_num_seqs=1000).ready
    engine = demo_engine(max_num_seqs=1000, kv_cache_dtype=kv_cache_dtype, **options)
    assert engine.ready.kv_cache_size_tokens == pytest.approx(times * plain.kv_cache_size_tokens, abs=16)
    cached = sum(cache.nbytes for cache in engine.runner._model.forward.caches)
    assert 0.99 * KV_CACHE_BYTES < cached <= KV_CACHE_BYTES
    assert (engine.ready.kv_cache_dtype, plain.kv_cache_dtype) == (name, "float32")
    assert share_of_right_answers(engine) >= least


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_the_requested_attention_backend_is_used() -> None:
    assert demo_engine().ready.attention_backend == "native"
    for kv_cache_dtype in ("auto", "int8"):
        config = EngineConfig(model=str(DEMO_MODEL), attention_backend="native", kv_cache_dtype=kv_cache_dtype)
        assert isinstance(load_model(config, DEMO_MODEL).forward, NativeForward)
    reference = demo_engine(attention_backend="reference")
    assert reference.ready.attention_backend == "reference"
    assert share_of_right_answers(reference) >= 0.95


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_a_backend_that_lacks_the_models_heads_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SHAPE, "head_dim": 24, "num_hidden_layers": 1})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"attention_backend is 'native'.*LlamaForCausalLM.*by reference here"):
        build_engine(EngineConfig(model=str(tmp_path), attention_backend="native"), tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention_backend": "flash"},
            "attention_backend must be one of auto, triton, native, reference, got",
        ),
        ({"attention_backend": "triton"}, "'triton' needs a GPU"),
        ({"attention_backend": "native", "device": "cuda"}, "'native' needs device 'cpu' and native kernels"),
        ({"attention_backend": "native", "native_kernels": False}, "needs device 'cpu' and native kernels"),
        ({"attention_backend": "native", "deterministic": True}, "'native' cannot do --deterministic"),
        ({"attention_backend": "native", "kv_cache_dtype": "fp8"}, "'native' cannot do kv_cache_dtype 'fp8'"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of auto, int8, fp8, fp8_e4m3, fp8_e5m2, got 'int4'"),
    ],
)
def test_impossible_options_are_refused_before_loading(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EngineConfig(model="any", **options)


def test_a_gpu_without_the_floats_is_refused() -> None:
    for name in ("fp8", "fp8_e4m3"):
        config = EngineConfig(model="any", device="cuda", kv_cache_dtype=name)
        check_float8(config, (9, 0))
        with pytest.raises(ConfigurationError, match=r"kv_cache_dtype '.*has 8\.6; use 'fp8_e5m2'"):
            check_float8(config, (8, 6))
    check_float8(EngineConfig(model="any", device="cuda", kv_cache_dtype="fp8_e5m2"), (8, 0))


def test_a_model_that_needs_more_than_eight_bits_is_refused_by_name(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    """An unattended value is so large that all others become 0 next to it."""
    module = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen2Config(**{**SHAPE, "num_hidden_layers": 1})
    )
    attention = module.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.bias[0] = 1e6
        for head in range(2):
            attention.o_proj.weight[:, head * 16] = 0.0
    module.save_pretrained(tmp_path)
    shutil.copy(model_folder("qwen2") / "tokenizer.json", tmp_path)
    message = "Qwen2ForCausalLM cannot be served with a KV cache of fp8_e4m3 and packed layers: .*logits differ"
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(model=str(tmp_path), kv_cache_dtype="fp8"), tmp_path)
    assert load_model(EngineConfig(model=str(tmp_path)), tmp_path).architecture == "Qwen2ForCausalLM"


def test_scales_make_small_and_large_numbers_fit(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """Without scales these values would be 0 in eight bits, and these keys would overflow."""
    module = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"), attn_implementation="eager")
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.v_proj.weight *= 1e-4
            layer.self_attn.o_proj.weight *= 1e4
            layer.self_attn.k_proj.weight *= 1e3
            layer.self_attn.q_proj.weight *= 1e-3
    module.save_pretrained(tmp_path)
    shutil.copy(model_folder("llama") / "tokenizer.json", tmp_path)
    for kv_cache_dtype, backend in (("fp8", "reference"), ("int8", "native" if HAS_COMPILER else "reference")):
        config = EngineConfig(model=str(tmp_path), kv_cache_dtype=kv_cache_dtype)
        assert load_model(config, tmp_path).attention_backend == backend


def test_an_eight_bit_cache_is_refused_for_a_model_with_foreign_attention(model_folder: Callable[[str], Path]) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    gathering = gather_forward(module, ForwardSettings(64), CutRule())
    with pytest.raises(ModelLoadError, match=r"kv_cache_dtype 'fp8_e4m3' needs a model that attends by our kernels"):
        use_eight_bit_cache(gathering, "fp8_e4m3", 128, 64)


def test_a_configuration_from_before_the_options_keeps_its_meaning() -> None:
    old = EngineConfig.decode(b'{"model":"m","device":"cuda","quantization":null}')
    assert (old.attention_backend, old.kv_cache_dtype, old.eight_bit_cache) == ("auto", "auto", None)
    new = EngineConfig(model="m", device="cuda", attention_backend="triton", kv_cache_dtype="fp8", quantization="fp8")
    assert EngineConfig.decode(new.encode()) == new
    assert describe_choices(new) == ", attention triton, KV cache in fp8_e4m3, weights in fp8"
    assert describe_choices(old) == ""
