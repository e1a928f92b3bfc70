"""Requests with low-rank adapters have the tokens of the model with the adapter merged, in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from penstock.shared.control.engine import Sleep, SleepState, WakeUp
from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.lora import LoRARequest
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine
from penstock.worker.engine.execution.model_runner import ModelRunner
from penstock.worker.models.adapters import attach
from penstock.worker.models.adapters.slots import StackedLayout
from penstock.worker.models.lean.native import NativeForward

from ....conftest import DEMO_MODEL
from ..harness import VOCAB_SIZE, ask, generate, request, run
from .peft_folders import MIXED, R8, greedy, load_base, lora_request, merge, write_adapter

NUM_TOKENS = 6
Truth = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def adapters(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``adapters("llama")``: requests' words for an adapter of each kind of ``MIXED``, and what each prompt of the
    fixture ``prompts`` becomes with each of them and, as "base", with none."""
    made: dict[str, tuple[dict[str, LoRARequest], Truth]] = {}

    def make(name: str, prompts: list[list[int]]) -> tuple[dict[str, LoRARequest], Truth]:
        if name not in made:
            root, folder = tmp_path_factory.mktemp(f"adapters-{name}"), model_folder(name)
            said: dict[str, LoRARequest] = {}
            truth: Truth = {}
            for number, (key, kind) in enumerate({"base": None, **MIXED}.items()):
                module = load_base(folder)
                if kind is not None:
                    said[key] = lora_request(write_adapter(root / key, module, kind, seed=number), number)
                    merge(module, kind, seed=number)
                for index, prompt in enumerate(prompts):
                    truth[key, index] = greedy(module, prompt, NUM_TOKENS)
            made[name] = said, truth
        return made[name]

    return make


def engine_over(folder: Path, **options: Any) -> Engine:
    given: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 32, "kv_cache_memory": 1 << 22, "enable_lora": True}
    return build_engine(EngineConfig(model=str(folder), **{**given, **options}), folder)


def mixed(prompts: list[list[int]], said: dict[str, LoRARequest], **params: Any) -> list[EngineCoreRequest]:
    """Each prompt with each adapter and with none, one after the other."""
    return [
        msgspec.structs.replace(
            request(f"{key} {index}", prompt, max_tokens=NUM_TOKENS, **params), lora_request=said.get(key)
        )
        for index, prompt in enumerate(prompts)
        for key in ("base", *said)
    ]


def tokens_of(truth: Truth) -> dict[str, list[int]]:
    return {f"{key} {index}": tokens for (key, index), tokens in truth.items()}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_a_mixed_batch_has_the_tokens_of_merged_models(
    name: str, model_folder: Callable[[str], Path], prompts: list[list[int]], adapters: Any
) -> None:
    said, truth = adapters(name, prompts)
    assert len({tuple(truth[key, 2]) for key in ("base", *said)}) == 4, "the adapters make no difference"
    engine = engine_over(model_folder(name))
    assert generate(engine.core, mixed(prompts, said)) == tokens_of(truth)


CUT: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
    "preempted": {"kv_cache_memory": 40 * 4 * 1024, "block_size": 4, "max_model_len": 64},
    "one slot": {"max_loras": 1, "max_cpu_loras": 1},
    "without prefix caching": {"enable_prefix_caching": False},
    "one batch ahead": {"async_scheduling": True, "max_loras": 1},
    "deterministic": {"deterministic": True},
    "drafting": {"speculative": "ngram:3"},
    "in Python": {"block_size": 5},
    "in torch": {"native_kernels": False},
}


@pytest.mark.parametrize("options", CUT.values(), ids=CUT)
def test_however_requests_are_cut_and_wherever_they_are_computed(
    options: dict[str, Any], model_folder: Callable[[str], Path], prompts: list[list[int]], adapters: Any
) -> None:
    said, truth = adapters("llama", prompts)
    engine = engine_over(model_folder("llama"), **options)
    for _ in range(2):
        assert generate(engine.core, mixed(prompts, said)) == tokens_of(truth)
    if "kv_cache_memory" in options:
        assert engine.core.scheduler.stats().num_preemptions > 0


def test_as_triton_has_them(
    model_folder: Callable[[str], Path], prompts: list[list[int]], adapters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of one rank are stacked; the kernels' references compute them here."""
    said, truth = adapters("llama", prompts)
    monkeypatch.setattr(attach, "_layout_for", StackedLayout)
    engine = engine_over(model_folder("llama"), block_size=5, max_loras=2, max_lora_rank=16)
    assert generate(engine.core, mixed(prompts, said)) == tokens_of(truth)


@pytest.mark.parametrize("layout", ["native", "packed", "stacked"])
@pytest.mark.parametrize("level", [1, 2])
def test_adapters_sleep_with_their_engine(
    level: int,
    layout: str,
    model_folder: Callable[[str], Path],
    prompts: list[list[int]],
    adapters: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, truth = adapters("llama", prompts)
    if layout == "stacked":
        monkeypatch.setattr(attach, "_layout_for", StackedLayout)
    options = {} if layout == "native" else {"block_size": 5}
    engine = engine_over(model_folder("llama"), max_loras=2, max_lora_rank=16, **options)
    assert generate(engine.core, mixed(prompts, said)) == tokens_of(truth)
    loaded = engine.core.take_lora_digests()
    assert loaded == sorted(adapter.digest for adapter in said.values())
    tags = ["weights", "kv_cache", "adapters"]
    assert ask(engine, Sleep(level=level)) == SleepState(level, tags)
    assert engine.core.take_lora_digests() == []
    slots = engine.runner._adapters
    assert slots is not None
    assert slots.are_released
    if isinstance(slots._layout, StackedLayout):
        assert slots._layout._stacks == []
    # A client that names every part but this one, which it may not know.
    assert ask(engine, WakeUp(["kv_cache"])) == SleepState(level, ["weights", "adapters"])
    assert engine.core.take_lora_digests() is None
    assert ask(engine, WakeUp(["weights"])) == SleepState()
    assert engine.core.take_lora_digests() == loaded
    assert generate(engine.core, mixed(prompts, said)) == tokens_of(truth)


def test_layers_that_are_fused_in_the_model_itself(
    model_folder: Callable[[str], Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    folder = model_folder("phi3")
    module = load_base(folder)
    said = lora_request(write_adapter(tmp_path / "a", module, R8))
    expected = greedy(merge(module, R8), prompts[2], NUM_TOKENS)
    asked = mixed([prompts[2]], {"r8": said})
    assert generate(engine_over(folder).core, asked)["r8 0"] == expected


@pytest.mark.parametrize("quantization", ["int8", "int4-mixed", "int4"])
def test_adapters_work_with_quantised_weights(quantization: str, prompts: list[list[int]], tmp_path: Path) -> None:
    """The adapter is not quantised; the compiled decoder applies it like the layers in Python."""
    said = {"r8": lora_request(write_adapter(tmp_path / "a", load_base(DEMO_MODEL), R8))}
    found = [
        generate(engine_over(DEMO_MODEL, quantization=quantization, **options).core, mixed(prompts, said))
        for options in ({}, {"block_size": 5})
    ]
    assert found[0] == found[1]
    assert found[0]["r8 2"] != found[0]["base 2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_in_any_company(
    dtype: str, model_folder: Callable[[str], Path], prompts: list[list[int]], adapters: Any
) -> None:
    said, _ = adapters("llama", prompts)
    engine = engine_over(model_folder("llama"), dtype=dtype, enable_prefix_caching=False, max_num_batched_tokens=48)
    runner = engine.core._executor
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner._model.forward, NativeForward)
    asked = mixed(prompts, said, logprobs=3)
    together = run(engine.core, asked)
    for one in asked[::3]:
        alone = run(engine.core, [one])[one.request_id]
        assert alone.new_token_ids == together[one.request_id].new_token_ids
        assert alone.new_logprobs == together[one.request_id].new_logprobs


def test_models_that_are_computed_in_other_ways_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    config = transformers.AutoConfig.for_model("bloom", **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="enable_lora needs a model whose tokens are packed, and Bloom"):
        engine_over(tmp_path, max_model_len=64)


def test_equal_bits_need_the_compiled_kernels(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigurationError, match="enable_lora and deterministic need the compiled kernels"):
        engine_over(model_folder("llama"), deterministic=True, native_kernels=False)


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match=r"max_cpu_loras \(2\) must be at least max_loras \(8\)"):
        EngineConfig(model="m", enable_lora=True, max_cpu_loras=2)
    with pytest.raises(ConfigurationError, match="engine 'http' serves no adapters"):
        EngineConfig(model="m", enable_lora=True, engine="http", engine_url="http://127.0.0.1:8080")
