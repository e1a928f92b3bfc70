"""Control calls on engines with real models: the same tokens after sleep, saved weights, profiles, dummy batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file

from penstock.shared.control import (
    CallError,
    CollectiveRpc,
    DummyBatchDone,
    ExecuteDummyBatch,
    IsSleeping,
    ProfileSaved,
    ProfileStarted,
    RpcResult,
    SaveShardedState,
    ShardedStateSaved,
    Sleep,
    SleepState,
    StartProfile,
    StopProfile,
    Utility,
    UtilityAnswer,
    WakeUp,
)
from penstock.shared.messages import Ready, UtilityCall
from penstock.worker.config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine
from penstock.worker.models.packed_linear import PackedLinear

from .harness import SHAPE, CoreProcess, generate, request

PROMPT = list(range(5, 45))
ALL = ["weights", "kv_cache"]
# Large enough that linear layers are packed.
LARGE = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


@pytest.fixture
def model(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model with packed and plain linear layers, tied embeddings, and biases."""
    folder = tmp_path / "model"
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**{**LARGE, "tie_word_embeddings": True})
    module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    module.save_pretrained(folder)
    (folder / "tokenizer.json").write_text((model_folder("qwen2") / "tokenizer.json").read_text())
    return folder


Make = Callable[..., Engine]


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Make:
    def make(folder: Path = model, **options: Any) -> Engine:
        small: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 4, "kv_cache_memory": 1 << 22, **options}
        return build_engine(EngineConfig(model=str(folder), profile_dir=str(tmp_path / "profiles"), **small), folder)

    return make


def ask(engine: Engine, call: Utility) -> UtilityAnswer:
    output = engine.control.answer(UtilityCall(1, call))
    assert output.error is None, output.error
    assert output.answer is not None
    return output.answer


def refusal(engine: Engine, call: Utility) -> CallError:
    output = engine.control.answer(UtilityCall(1, call))
    assert output.answer is None
    assert output.error is not None
    return output.error


def tokens(engine: Engine, **params: Any) -> list[int]:
    return generate(engine.core, [request("r", PROMPT, **params)])["r"]


def test_the_fixture_has_packed_and_plain_layers(make: Make) -> None:
    module = make().control._parts.rpc_engine.model.module
    kinds = {type(part) for part in module.modules()}
    assert {PackedLinear, torch.nn.Linear} <= kinds


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("level", [1, 2])
def test_the_same_tokens_after_sleep(make: Make, level: int, options: dict[str, Any]) -> None:
    engine = make(**options)
    seeded = {"temperature": 1.0, "seed": 3, "logprobs": 2}
    before = tokens(engine), tokens(engine, **seeded)
    assert ask(engine, Sleep(level=level)) == ask(engine, IsSleeping()) == SleepState(level, ALL)
    assert ask(engine, Sleep(level=1)) == SleepState(level, ALL)
    assert ask(engine, WakeUp(["kv_cache"])) == SleepState(level, ["weights"])
    assert ask(engine, WakeUp(["weights"])) == ask(engine, WakeUp()) == SleepState()
    assert (tokens(engine), tokens(engine, **seeded)) == before


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_an_accelerator_gets_its_memory_back(make: Make, level: int) -> None:
    engine = make(device="cuda", gpu_memory_utilization=0.1, kv_cache_memory=1 << 26)
    before, num_bytes = tokens(engine), torch.cuda.memory_allocated()
    ask(engine, Sleep(level=level))
    assert torch.cuda.memory_allocated() < num_bytes / 4
    ask(engine, WakeUp())
    assert tokens(engine) == before


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_other_architectures_sleep_as_well(make: Make, model_folder: Callable[[str], Path], architecture: str) -> None:
    engine = make(model_folder(architecture))
    before = tokens(engine)
    ask(engine, Sleep(level=2))
    ask(engine, WakeUp())
    assert tokens(engine) == before


def test_what_is_in_the_cache_is_forgotten(make: Make) -> None:
    engine = make()
    tokens(engine)
    before = engine.core.scheduler.stats().prefix_cache_hits
    tokens(engine)
    assert engine.core.scheduler.stats().prefix_cache_hits == before + 32
    ask(engine, Sleep())
    ask(engine, WakeUp())
    tokens(engine)
    assert engine.core.scheduler.stats().prefix_cache_hits == before + 32


def test_what_cannot_be_done_now_is_refused_by_name(make: Make) -> None:
    engine = make()
    engine.core.add_request(request("r", PROMPT))
    engine.core.step()
    assert refusal(engine, Sleep()) == CallError("engine_state", "the engine cannot sleep while it holds requests (1)")
    engine.core.abort_requests(["r"])
    ask(engine, Sleep())
    assert refusal(engine, ExecuteDummyBatch()).message == "the engine's weights and kv_cache sleep; wake them up first"
    ask(engine, WakeUp(["weights"]))
    assert refusal(engine, ExecuteDummyBatch()).message == "the engine's kv_cache sleep; wake them up first"
    assert refusal(engine, StopProfile()).code == "engine_state"


def test_a_model_that_has_changed_in_its_folder_is_not_woken_up(make: Make, model: Path) -> None:
    engine = make()
    before = tokens(engine)
    ask(engine, Sleep(level=2))
    aside = model.with_name("aside")
    model.rename(aside)
    assert refusal(engine, WakeUp()).code == "model_load_error"
    other = transformers.Qwen2Config(**{**LARGE, "intermediate_size": 640, "tie_word_embeddings": True})
    transformers.AutoModelForCausalLM.from_config(other).save_pretrained(model)
    error = refusal(engine, WakeUp())
    assert (error.code, "other names, shapes or types" in error.message) == ("model_load_error", True)
    assert ask(engine, IsSleeping()) == SleepState(2, ALL)
    for path in model.iterdir():
        path.unlink()
    model.rmdir()
    aside.rename(model)
    ask(engine, WakeUp())
    assert tokens(engine) == before


def test_a_dummy_batch_touches_no_request(make: Make) -> None:
    for options in ({}, {"deterministic": True}):
        engine = make(**options)
        alone = tokens(engine)
        engine.core.add_request(request("r", PROMPT))
        got: list[int] = []
        while engine.core.has_work:
            answer = ask(engine, ExecuteDummyBatch())
            assert isinstance(answer, DummyBatchDone)
            assert answer.time_s > 0
            got += [token_id for output in engine.core.step() for token_id in output.new_token_ids]
            engine.core.check_invariants()
        assert got == alone


def test_a_profile_is_a_trace_of_the_steps_between(make: Make, tmp_path: Path) -> None:
    engine = make()
    assert ask(engine, StartProfile()) == ProfileStarted(str(tmp_path / "profiles"))
    assert "recorded already" in refusal(engine, StartProfile()).message
    tokens(engine, max_tokens=2)
    saved = ask(engine, StopProfile())
    assert isinstance(saved, ProfileSaved)
    assert Path(saved.path).parent == tmp_path / "profiles"
    assert Path(saved.path).stat().st_size == saved.num_bytes
    names = {event.get("name") for event in json.loads(Path(saved.path).read_text())["traceEvents"]}
    assert "aten::embedding" in names
    assert "no profile" in refusal(engine, StopProfile()).message


def test_registered_methods_run_and_others_do_not(make: Make) -> None:
    engine = make()
    info = ask(engine, CollectiveRpc("device_info"))
    assert isinstance(info, RpcResult)
    assert (info.result["device"], info.result["num_threads"], info.result["dtype"]) == ("cpu", 1, "float32")
    memory = ask(engine, CollectiveRpc("memory_summary"))
    assert isinstance(memory, RpcResult)
    assert memory.result["kv_cache_bytes"] == 1 << 21  # four requests of 256 tokens
    assert memory.result["rss_bytes"] > 1 << 26
    assert ask(engine, CollectiveRpc("check_invariants")) == RpcResult(True)
    unknown = refusal(engine, CollectiveRpc("device_info.__globals__"))
    assert (unknown.code, "there are check_invariants, device_info, memory_summary" in unknown.message) == (
        "validation_error",
        True,
    )
    assert refusal(engine, CollectiveRpc("device_info", None, [1])).code == "engine_call_failed"


def saved_tensors(answer: UtilityAnswer) -> dict[str, torch.Tensor]:
    assert isinstance(answer, ShardedStateSaved)
    tensors: dict[str, torch.Tensor] = {}
    for name in answer.files:
        part = load_file(Path(answer.path) / name)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


def test_saved_weights_are_those_that_were_loaded(make: Make, model: Path, tmp_path: Path) -> None:
    original = load_file(model / "model.safetensors")
    engine = make()
    answer = ask(engine, SaveShardedState(str(tmp_path / "new" / "saved"), None, 1_000_000))
    assert isinstance(answer, ShardedStateSaved)
    assert answer.files == [f"model-rank-0-part-{part}.safetensors" for part in range(len(answer.files))]
    assert len(answer.files) > 2
    tensors = saved_tensors(answer)
    assert tensors.keys() == original.keys()
    for name, tensor in original.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name
    sizes = [sum(t.nbytes for t in load_file(Path(answer.path) / name).values()) for name in answer.files]
    assert max(sizes) <= 1_000_000
    again = refusal(engine, SaveShardedState(answer.path))
    assert (again.code, "is not empty" in again.message) == ("engine_state", True)


@pytest.mark.parametrize(
    ("architecture", "options"), [("gpt_oss", {}), ("gemma2", {}), ("llama", {"dtype": "bfloat16"})]
)
def test_saved_weights_can_be_served(
    make: Make,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    architecture: str,
    options: dict[str, Any],
) -> None:
    engine = make(model_folder(architecture), **options)
    answer = ask(engine, SaveShardedState(str(tmp_path / "saved"), "weights-{part}.safetensors", 50_000))
    assert isinstance(answer, ShardedStateSaved)
    served = make(Path(answer.path))
    assert served.ready.dtype == engine.ready.dtype
    assert tokens(served) == tokens(engine)
    if not options:
        original = load_file(model_folder(architecture) / "model.safetensors")
        assert saved_tensors(answer).keys() == original.keys()


def test_a_sleeping_engine_without_weights_cannot_save_them(make: Make, tmp_path: Path) -> None:
    engine = make()
    ask(engine, Sleep(level=2))
    assert "weights sleep" in refusal(engine, SaveShardedState(str(tmp_path / "saved"))).message
    assert not (tmp_path / "saved").exists()


def test_a_place_that_cannot_be_written_to(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(make(), SaveShardedState(str(tmp_path / "file" / "saved")))
    assert (error.code, "cannot be written to" in error.message) == ("engine_state", True)


def test_memory_really_falls(core_process: CoreProcess, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Of a process of its own; with tens of MiB of weights and of used cache, allocators' own habits do not matter."""
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

    def run(name: str) -> list[list[int]]:
        prompts = [[5 + (7 * i + offset) % 100 for i in range(700)] for offset in range(2)]
        for index, prompt in enumerate(prompts):
            core_process.send(request(f"{name}{index}", prompt, max_tokens=3))
        outputs = core_process.collect(2)
        rss[name] = process.memory_info().rss
        return [[t for row in outputs[f"{name}{index}"] for t in row.new_token_ids] for index in range(2)]

    def call(name: str, utility: Utility) -> None:
        assert core_process.call(utility).error is None
        rss[name] = process.memory_info().rss

    first = run("first")
    call("level 1", Sleep(level=1))
    call("level 2", Sleep(level=2))
    call("awake", WakeUp())
    assert run("again") == first
    assert rss["first"] - rss["level 1"] > used_cache / 2
    assert rss["level 1"] - rss["level 2"] > weights / 2
    assert rss["again"] - rss["level 2"] > (used_cache + weights) / 2
