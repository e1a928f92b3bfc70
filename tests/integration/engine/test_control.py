"""Control calls on engines with real models: the same tokens after sleep, saved weights, profiles, dummy batches."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.shared.control.calls import CallError, Utility
from penstock.shared.control.engine import (
    CollectiveRpc,
    DummyBatchDone,
    ExecuteDummyBatch,
    IsSleeping,
    ProfileSaved,
    ProfileStarted,
    RpcResult,
    Sleep,
    SleepState,
    StartProfile,
    StopProfile,
    WakeUp,
)
from penstock.shared.messages.core import Ready
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.loading import loader
from penstock.worker.models.placing.packed_linear import PackedLinear

from ...conftest import DEMO_MODEL
from .harness import LARGE, LONG_PROMPT, SHAPE, CoreProcess, MakeEngine, ask, refusal, request, tokens

ALL = ["weights", "kv_cache"]


def test_the_fixture_has_packed_and_plain_weights(make_engine: MakeEngine) -> None:
    parts = list(make_engine().control._parts.rpc_engine.model.network.modules())
    assert any(isinstance(part, PackedLinear) for part in parts)
    assert any(isinstance(part, torch.nn.Embedding) for part in parts)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("level", [1, 2])
def test_the_same_tokens_after_sleep(make_engine: MakeEngine, level: int, options: dict[str, Any]) -> None:
    engine = make_engine(**options)
    seeded = {"temperature": 1.0, "seed": 3, "logprobs": 2}
    before = tokens(engine), tokens(engine, **seeded)
    assert ask(engine, Sleep(level=level)) == ask(engine, IsSleeping()) == SleepState(level, ALL)
    assert ask(engine, Sleep(level=1)) == SleepState(level, ALL)
    assert ask(engine, WakeUp(["kv_cache"])) == SleepState(level, ["weights"])
    assert ask(engine, WakeUp(["weights"])) == ask(engine, WakeUp()) == SleepState()
    assert (tokens(engine), tokens(engine, **seeded)) == before


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_an_accelerator_gets_its_memory_back(make_engine: MakeEngine, level: int) -> None:
    engine = make_engine(device="cuda", gpu_memory_utilization=0.1, kv_cache_memory=1 << 26)
    before, num_bytes = tokens(engine), torch.cuda.memory_allocated()
    ask(engine, Sleep(level=level))
    assert torch.cuda.memory_allocated() < num_bytes / 4
    ask(engine, WakeUp())
    assert tokens(engine) == before


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_an_accelerator_without_room_for_all_tensors_gets_the_others_back(make_engine: MakeEngine, level: int) -> None:
    engine = make_engine(device="cuda", gpu_memory_utilization=0.1, kv_cache_memory=1 << 26)
    before = tokens(engine)
    ask(engine, Sleep(level=level))
    asleep, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    try:
        for num_bytes in (1 << 20, 40 << 20):  # for no tensor, and for the weights without the cache
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
            assert "out of memory" in refusal(engine, WakeUp()).message
            assert ask(engine, IsSleeping()) == SleepState(level, ALL)
            assert torch.cuda.memory_allocated() == asleep
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    ask(engine, WakeUp())
    assert tokens(engine) == before


class FailingAllocation(TorchDispatchMode):
    """Lets the allocation with a number fail, of those that torch makes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._num_left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and result.device.type != "meta":
            self._num_left -= 1
            if self._num_left == 0:
                raise MemoryError(f"{result.nbytes} bytes are missing")
        return result


@pytest.mark.parametrize(("level", "number"), [(1, 1), (1, 2), (2, 1), (2, 9), (2, 40)])
def test_a_wake_up_that_fails_half_way_gives_everything_back(make_engine: MakeEngine, level: int, number: int) -> None:
    engine = make_engine()
    before = tokens(engine)
    ask(engine, Sleep(level=level))
    with FailingAllocation(number):
        error = refusal(engine, WakeUp())
    assert re.search("the engine still sleeps, because .* MemoryError: .* bytes are missing", error.message)
    assert ask(engine, IsSleeping()) == SleepState(level, ALL)
    model = engine.control._parts.rpc_engine.model
    assert level == 1 or all(tensor.device.type == "meta" for tensor in model.network.parameters())
    assert not sum(cache.nbytes for cache in model.forward.caches)
    ask(engine, WakeUp())
    assert tokens(engine) == before


def test_a_stored_model_is_woken_up_from_its_structure(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    before = tokens(engine)
    monkeypatch.setattr(loader, "load_weights", lambda *_: pytest.fail("transformers loads it"))
    ask(engine, Sleep(level=2))
    ask(engine, WakeUp())
    assert tokens(engine) == before


def test_the_second_sleep_gives_back_as_much_as_the_first(tmp_path: Path) -> None:
    """Without files of weights, so that each wake-up makes a whole module of transformers."""
    transformers.LlamaConfig(**{**SHAPE, "hidden_size": 512, "num_hidden_layers": 3}).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), load_format="dummy", num_threads=1, kv_cache_memory=1 << 20)
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    core = CoreProcess()
    try:
        assert isinstance(core.start(config.encode()), Ready)
        sizes: list[int] = []
        for _ in range(3):
            assert core.call(Sleep(level=2)).error is None
            sizes.append(psutil.Process(core.process.pid).memory_full_info().uss)
            assert core.call(WakeUp()).error is None
    finally:
        core.close()
    assert max(sizes) < 1.1 * sizes[0], sizes


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_other_architectures_sleep_as_well(
    make_engine: MakeEngine, model_folder: Callable[[str], Path], architecture: str
) -> None:
    engine = make_engine(model_folder(architecture))
    before = tokens(engine)
    ask(engine, Sleep(level=2))
    ask(engine, WakeUp())
    assert tokens(engine) == before


def test_sleep_clears_the_prefix_cache(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokens(engine)
    before = engine.core.scheduler.stats().prefix_cache_hits
    tokens(engine)
    assert engine.core.scheduler.stats().prefix_cache_hits == before + 32
    ask(engine, Sleep())
    ask(engine, WakeUp())
    tokens(engine)
    assert engine.core.scheduler.stats().prefix_cache_hits == before + 32


def test_calls_that_are_impossible_now_are_refused_by_name(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.core.add_request(request("r", LONG_PROMPT))
    engine.core.step_fn()
    assert refusal(engine, Sleep()) == CallError("engine_state", "the engine cannot sleep while it holds requests (1)")
    engine.core.abort_requests(["r"])
    ask(engine, Sleep())
    assert refusal(engine, ExecuteDummyBatch()).message == "the engine's weights and kv_cache sleep; wake them up first"
    ask(engine, WakeUp(["weights"]))
    assert refusal(engine, ExecuteDummyBatch()).message == "the engine's kv_cache sleep; wake them up first"
    assert refusal(engine, StopProfile()).code == "engine_state"


def test_a_model_that_has_changed_in_its_folder_is_not_woken_up(make_engine: MakeEngine, packed_model: Path) -> None:
    engine = make_engine()
    before = tokens(engine)
    ask(engine, Sleep(level=2))
    aside = packed_model.with_name("aside")
    packed_model.rename(aside)
    assert refusal(engine, WakeUp()).code == "model_load_error"
    other = transformers.Qwen2Config(**{**LARGE, "intermediate_size": 640, "tie_word_embeddings": True})
    transformers.AutoModelForCausalLM.from_config(other).save_pretrained(packed_model)
    error = refusal(engine, WakeUp())
    assert (error.code, "other names, shapes or types" in error.message) == ("model_load_error", True)
    assert ask(engine, IsSleeping()) == SleepState(2, ALL)
    for path in packed_model.iterdir():
        path.unlink()
    packed_model.rmdir()
    aside.rename(packed_model)
    ask(engine, WakeUp())
    assert tokens(engine) == before


def test_a_dummy_batch_touches_no_request(make_engine: MakeEngine) -> None:
    for options in ({}, {"deterministic": True}):
        engine = make_engine(**options)
        alone = tokens(engine)
        engine.core.add_request(request("r", LONG_PROMPT))
        got: list[int] = []
        while engine.core.has_work:
            answer = ask(engine, ExecuteDummyBatch())
            assert isinstance(answer, DummyBatchDone)
            assert answer.time_s > 0
            got += [token_id for output in engine.core.step_fn() for token_id in output.new_token_ids]
            engine.core.check_invariants()
        assert got == alone


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_profile_is_a_trace_of_the_steps_between(
    make_engine: MakeEngine, tmp_path: Path, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    assert ask(engine, StartProfile()) == ProfileStarted(str(tmp_path / "profiles"))
    assert "recorded already" in refusal(engine, StartProfile()).message
    tokens(engine, max_tokens=2)
    saved = ask(engine, StopProfile())
    assert isinstance(saved, ProfileSaved)
    assert Path(saved.path).parent == tmp_path / "profiles"
    assert Path(saved.path).stat().st_size == saved.num_bytes
    names = {event.get("name") for event in json.loads(Path(saved.path).read_text())["traceEvents"]}
    assert {"aten::embedding", "penstock::decoder"} & names
    assert {"engine: schedule", "engine: execute", "engine: update"} <= names
    assert "no profile" in refusal(engine, StopProfile()).message


def test_a_profile_with_prefix_stacks_and_compression(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert isinstance(ask(engine, StartProfile("run-", with_stack=True, use_gzip=True)), ProfileStarted)
    tokens(engine, max_tokens=2)
    saved = ask(engine, StopProfile())
    assert isinstance(saved, ProfileSaved)
    path = Path(saved.path)
    assert (path.name.startswith("run-"), path.name.endswith(".json.gz")) == (True, True)
    with gzip.open(path, "rt") as trace:
        events = json.load(trace)["traceEvents"]
    assert any("engine_core.py" in str(event.get("name")) for event in events)


def test_registered_methods_run_and_others_do_not(make_engine: MakeEngine) -> None:
    engine = make_engine()
    info = ask(engine, CollectiveRpc("device_info"))
    assert isinstance(info, RpcResult)
    assert (info.result["device"], info.result["num_threads"], info.result["dtype"]) == ("cpu", 1, "float32")
    memory = ask(engine, CollectiveRpc("memory_summary"))
    assert isinstance(memory, RpcResult)
    assert memory.result["kv_cache_bytes"] == 1 << 21  # four requests of 256 tokens
    assert memory.result["rss_bytes"] > 1 << 26
    assert ask(engine, CollectiveRpc("check_invariants")) == RpcResult(True)
    unknown = refusal(engine, CollectiveRpc("device_info.__globals__"))
    assert (unknown.code, "available: check_invariants, device_info, memory_summary" in unknown.message) == (
        "validation_error",
        True,
    )
    assert refusal(engine, CollectiveRpc("device_info", None, [1])).code == "engine_call_failed"


def test_memory_really_falls(core_process: CoreProcess, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Measure a separate process with tens of MiB of weights and cache, so that allocator overhead is negligible."""
    folder = tmp_path / "model"
    shape = {**SHAPE, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**{**shape, "max_position_embeddings": 1024})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text((model_folder("llama") / "tokenizer.json").read_text())
    engine = EngineConfig(model=str(folder), num_threads=1, max_num_seqs=2, max_num_batched_tokens=1024)
    ready = core_process.start(engine.encode())
    assert isinstance(ready, Ready)
    weights = 4 * ready.num_parameters
    used_cache = 2 * 700 * 4 * 2 * 512 * 4
    process = psutil.Process(core_process.process.pid)
    rss: dict[str, int] = {}

    def memory() -> int:
        """Also what the system has put on its disk."""
        return process.memory_info().rss + process.memory_full_info().swap

    def run(name: str) -> list[list[int]]:
        prompts = [[5 + (7 * i + offset) % 100 for i in range(700)] for offset in range(2)]
        for index, prompt in enumerate(prompts):
            core_process.send(request(f"{name}{index}", prompt, max_tokens=3))
        outputs = core_process.collect(2)
        rss[name] = memory()
        return [[t for row in outputs[f"{name}{index}"] for t in row.new_token_ids] for index in range(2)]

    def call(name: str, utility: Utility) -> None:
        assert core_process.call(utility).error is None
        rss[name] = memory()

    first = run("first")
    call("level 1", Sleep(level=1))
    call("level 2", Sleep(level=2))
    call("awake", WakeUp())
    assert run("again") == first
    assert rss["first"] - rss["level 1"] > used_cache / 2
    assert rss["level 1"] - rss["level 2"] > weights / 2
    assert rss["again"] - rss["level 2"] > (used_cache + weights) / 2
