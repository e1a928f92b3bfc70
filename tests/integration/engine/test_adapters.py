"""Requests with low-rank adapters have the tokens of the model with the adapter merged, in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.shared.messages import EngineCoreRequest
from penstock.shared.params import LoRARequest
from penstock.worker.config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine

from .harness import generate, request
from .peft_folders import MIXED, greedy, load_base, lora_request, merge, write_adapter

NUM_TOKENS = 12
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


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
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
    "guessing": {"speculative": "ngram:3"},
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
