"""Adapters come beside the step loop, leave for others, and end requests by name where they cannot be had."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from penstock.shared.control.model import AddLora, ListLoras, LoraChanged, LoraList, PinLora, RemoveLora
from penstock.shared.messages.core import EngineCoreOutput, EngineCoreOutputs, UtilityCall, UtilityOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.lora import LoRARequest, LoraSetup
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.adapters.library import AdapterLibrary
from penstock.worker.engine.composition import Engine, build_engine
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.models.adapters import load

from ....processes import DEADLINE_S
from ..harness import LONG_PROMPT, CoreProcess, ask, generate, refusal, request
from .peft_folders import R4, R8, R16, greedy, load_base, lora_request, merge, write_adapter

PROMPT = [5, 9, 33]
KINDS = (R4, R8, R16)


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("llama")


@pytest.fixture(scope="module")
def base(folder: Path) -> transformers.PreTrainedModel:
    return load_base(folder)


@pytest.fixture(scope="module")
def said(base: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Three adapters, numbered from 1 on."""
    root = tmp_path_factory.mktemp("adapters")
    folders = [write_adapter(root / f"a{number}", base, kind, number) for number, kind in enumerate(KINDS, 1)]
    return [lora_request(folder, number) for number, folder in enumerate(folders, 1)]


@pytest.fixture
def make(folder: Path) -> Callable[..., Engine]:
    def make(**options: Any) -> Engine:
        given: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 4, "kv_cache_memory": 1 << 22, "enable_lora": True}
        return build_engine(EngineConfig(model=str(folder), **{**given, **options}), folder)

    return make


def asking(
    request_id: str, adapter: LoRARequest | None, prompt: list[int] = PROMPT, **params: Any
) -> EngineCoreRequest:
    return msgspec.structs.replace(request(request_id, prompt, **{"max_tokens": 6, **params}), lora_request=adapter)


def library_of(engine: Engine) -> AdapterLibrary:
    found = engine.core._adapters
    assert isinstance(found, AdapterLibrary)
    return found


def counting(library: AdapterLibrary) -> list[str]:
    """The folders that the library reads from now on."""
    load, found = library._load, []

    def counted(folder: Path, digest: str, slots: Any) -> Any:
        found.append(folder.name)
        return load(folder, digest, slots)

    library._load = counted
    return found


def end_of(core: EngineCore, asked: EngineCoreRequest) -> EngineCoreOutput:
    """Return how a request that is alone ends."""
    assert core.add_request(asked) is None
    outputs: list[EngineCoreOutput] = []
    while core.has_work:
        outputs += core.step_fn()
    core.check_invariants()
    return outputs[-1]


def test_files_that_are_replaced_while_they_are_read_are_no_adapter(
    make: Callable[..., Engine], said: list[LoRARequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest matched the request, but the files then belong to another adapter."""
    place = Path(shutil.copytree(said[0].lora_path, tmp_path / "moving"))

    def replace_and_read(*parts: Any) -> Any:
        shutil.rmtree(place)
        shutil.copytree(said[1].lora_path, place)
        return read(*parts)

    read = load.read_peft_folder
    monkeypatch.setattr(load, "read_peft_folder", replace_and_read)
    ended = end_of(make().core, asking("r", msgspec.structs.replace(said[0], lora_path=str(place))))
    assert ended.error is not None
    assert (ended.error.code, ended.error.retryable) == ("adapter_file", True)
    assert "changed while it was read" in ended.error.message


def test_an_adapter_load_does_not_block_other_requests(make: Callable[..., Engine], said: list[LoRARequest]) -> None:
    core = (engine := make()).core
    library, gate = library_of(engine), threading.Event()
    found = counting(library)

    def held_up(*parts: Any) -> Any:
        assert gate.wait(DEADLINE_S)
        return counted(*parts)

    counted, library._load = library._load, held_up
    call = UtilityCall(7, AddLora(said[2]))
    assert engine.control.answer(call) is None, "an operator waits, and nobody for the operator"
    for name, adapter in (("first", said[0]), ("second", said[0]), ("aborted", said[1])):
        assert core.add_request(asking(name, adapter)) is None
    assert core.num_unfinished_requests == 3
    assert len(generate_beside(core, asking("base", None))) == 6
    assert core.stats().num_waiting_reqs == 3
    core.abort_requests(["aborted"])
    assert engine.control.answer(call) is None
    gate.set()
    ended: dict[str, int] = {}
    while core.has_work:
        for output in core.step_fn():
            assert output.error is None
            ended[output.request_id] = ended.get(output.request_id, 0) + len(output.new_token_ids)
    assert ended == {"first": 6, "second": 6}
    assert found.count("a1") == 1, "both waited for one load"
    while (answer := engine.control.answer(call)) is None:
        core.step_fn()
    assert answer == UtilityOutput(7, answer=LoraChanged(True))


def generate_beside(core: EngineCore, asked: EngineCoreRequest) -> list[int]:
    """The tokens of a request while others wait."""
    assert core.add_request(asked) is None
    tokens: list[int] = []
    while True:
        for output in core.step_fn():
            assert output.request_id == asked.request_id
            tokens += output.new_token_ids
            if output.finished:
                return tokens


def test_with_more_adapters_than_slots_the_head_waits_and_is_not_overtaken(
    make: Callable[..., Engine], said: list[LoRARequest]
) -> None:
    core = make(max_loras=1).core
    for adapter in said[:2]:
        generate(core, [asking("load", adapter, max_tokens=1)])
    order: list[str] = []
    for name, adapter, num_tokens in (("a", said[0], 8), ("b", said[1], 4), ("a2", said[0], 4), ("base", None, 4)):
        assert core.add_request(asking(name, adapter, max_tokens=num_tokens)) is None
    while core.has_work:
        for output in core.step_fn():
            if output.request_id not in order:
                order.append(output.request_id)
            assert output.error is None
        core.check_invariants()
    assert order == ["a", "b", "a2", "base"]


def test_an_evicted_adapter_is_loaded_again_and_gives_the_same_tokens(
    make: Callable[..., Engine], said: list[LoRARequest], folder: Path
) -> None:
    engine = make(max_loras=1, max_cpu_loras=2)
    loads = counting(library_of(engine))
    expected = {
        str(number): greedy(merge(load_base(folder), kind, number), PROMPT, 6) for number, kind in enumerate(KINDS, 1)
    }
    # The second comes back while it is there, the first when it has left.
    for number in (1, 2, 3, 2, 1, 3):
        assert generate(engine.core, [asking(str(number), said[number - 1])]) == {str(number): expected[str(number)]}
    assert loads == ["a1", "a2", "a3", "a1", "a3"]


def test_an_engine_without_the_adapter_resumes_the_request(
    make: Callable[..., Engine], said: list[LoRARequest]
) -> None:
    asked = asking("r", said[2], LONG_PROMPT, max_tokens=12, temperature=0.8, seed=4)
    whole = generate(make().core, [asked])["r"]
    for cut in (1, 7, 11):
        resumed = msgspec.structs.replace(asked, output_token_ids=whole[:cut])
        assert generate(make().core, [resumed])["r"] == whole[cut:]


def test_blocks_of_a_prompt_are_shared_by_requests_with_one_adapter_alone(
    make: Callable[..., Engine], said: list[LoRARequest]
) -> None:
    core = make().core

    def num_cached(adapter: LoRARequest | None) -> int:
        return end_of(core, asking("r", adapter, LONG_PROMPT)).num_cached_tokens

    assert [num_cached(adapter) for adapter in (None, *said)] == [0, 0, 0, 0]
    assert [num_cached(adapter) for adapter in (None, *said)] == [32, 32, 32, 32]
    # By what it holds, not by its name.
    renamed = msgspec.structs.replace(said[0], lora_name="other", lora_int_id=77)
    assert num_cached(renamed) == 32


def test_adapters_that_cannot_be_had_end_their_requests_by_name(
    make: Callable[..., Engine], base: transformers.PreTrainedModel, said: list[LoRARequest], tmp_path: Path
) -> None:
    core = make().core
    replaced = shutil.copytree(said[0].lora_path, tmp_path / "replaced")
    shutil.copyfile(Path(said[1].lora_path) / "adapter_config.json", replaced / "adapter_config.json")
    dora = write_adapter(tmp_path / "dora", base, msgspec_free(R8, use_dora=True))
    cases = {
        "adapter_file": (
            LoRARequest("gone", 9, str(tmp_path / "gone"), digest=said[0].digest),
            LoRARequest("replaced", 9, str(replaced), digest=said[0].digest),
            LoRARequest("relative", 9, "relative", digest=said[0].digest),
        ),
        "unsupported_adapter": (lora_request(dora),),
    }
    told: list[str] = []
    for code, adapters in cases.items():
        for adapter in adapters:
            error = end_of(core, asking("r", adapter)).error
            assert error is not None
            assert (error.code, error.retryable) == (code, code == "adapter_file")
            told.append(error.message)
    for message, words in zip(told, ("there is no folder", "have been replaced", "--lora-folder", "DoRA"), strict=True):
        assert words in message
    assert len(generate(core, [asking("r", said[0])])["r"]) == 6
    assert not core.has_work


def msgspec_free(kind: Any, **config: Any) -> Any:
    """``kind`` with more in its configuration."""
    return type(kind)(rank=kind.rank, alpha=kind.alpha, targets=kind.targets, config=config)


def test_an_engine_without_adapters_refuses_them(make: Callable[..., Engine], said: list[LoRARequest]) -> None:
    engine = make(enable_lora=False)
    assert engine.ready.lora is None
    refused = engine.core.add_request(asking("r", said[0]))
    assert refused is not None
    assert refused.error is not None
    assert refused.error.code == "unsupported_parameter"
    assert "--enable-lora" in refused.error.message
    assert "--enable-lora" in refusal(engine, AddLora(said[0])).message
    assert ask(engine, ListLoras()) == LoraList([])


def test_an_adapter_is_located_by_its_digest_below_the_operators_folder(
    make: Callable[..., Engine], said: list[LoRARequest], tmp_path: Path
) -> None:
    shutil.copytree(said[1].lora_path, tmp_path / said[1].digest)
    engine = make(lora_folder=str(tmp_path))
    for path in ("anything", str(tmp_path / "gone"), said[1].digest):
        moved = msgspec.structs.replace(said[1], lora_path=path)
        assert len(generate(engine.core, [asking("r", moved)])["r"]) == 6
        assert ask(engine, RemoveLora(2)) == LoraChanged(True)


def test_a_core_process_reports_its_loaded_adapters(
    core_process: CoreProcess, folder: Path, said: list[LoRARequest]
) -> None:
    config = EngineConfig(model=str(folder), num_threads=1, kv_cache_memory=1 << 22, enable_lora=True, max_loras=3)
    ready = core_process.start(config.encode())
    assert ready.lora == LoraSetup(max_loras=3, max_lora_rank=64, max_cpu_loras=32)

    def next_digests() -> list[str]:
        while True:
            message = core_process.receive()
            if isinstance(message, EngineCoreOutputs) and message.lora_digests is not None:
                return message.lora_digests

    core_process.send(UtilityCall(1, AddLora(said[0])))
    assert core_process.answer() == UtilityOutput(1, answer=LoraChanged(True))
    assert next_digests() == [said[0].digest]
    core_process.send(asking("r", said[1]))
    assert next_digests() == sorted([said[0].digest, said[1].digest])


def test_operators_add_list_pin_and_remove(make: Callable[..., Engine], said: list[LoRARequest]) -> None:
    engine = make(max_loras=2, max_cpu_loras=2)
    core = engine.core
    assert engine.ready.lora is not None
    assert (engine.ready.lora.max_loras, engine.ready.lora.max_lora_rank) == (2, 64)
    assert core.take_lora_digests() is None
    assert ask(engine, AddLora(said[0])) == LoraChanged(True)
    assert ask(engine, AddLora(said[0])) == LoraChanged(False)
    unnamed = msgspec.structs.replace(said[0], digest="", lora_int_id=8)
    assert ask(engine, AddLora(unnamed)) == LoraChanged(False)
    assert core.take_lora_digests() == [said[0].digest]
    assert core.take_lora_digests() is None
    assert ask(engine, PinLora(1)) == LoraChanged(True)
    assert ask(engine, PinLora(2)) == LoraChanged(False)
    # The pinned one stays, whatever comes.
    for adapter in said[1:]:
        assert len(generate(core, [asking("r", adapter)])["r"]) == 6
    assert core.take_lora_digests() == sorted([said[0].digest, said[2].digest])
    assert ask(engine, ListLoras()) == LoraList([1, 3, 8])
    error = refusal(engine, PinLora(3))
    assert (error.code, "--max-loras" in error.message) == ("engine_state", True)
    assert ask(engine, PinLora(1, pinned=False)) == LoraChanged(True)
    assert ask(engine, PinLora(1, pinned=False)) == LoraChanged(False)
    assert ask(engine, PinLora(3)) == LoraChanged(True)
    assert ask(engine, PinLora(3, pinned=False)) == LoraChanged(True)
    assert ask(engine, RemoveLora(2)) == LoraChanged(False)
    # One that is used goes with its last request.
    assert core.add_request(asking("r", said[2])) is None
    core.step_fn()
    assert ask(engine, RemoveLora(3)) == LoraChanged(True)
    assert ask(engine, ListLoras()) == LoraList([1, 8])
    while core.has_work:
        assert all(output.error is None for output in core.step_fn())
    assert core.take_lora_digests() == [said[0].digest]
    assert ask(engine, RemoveLora(8)) == LoraChanged(True)
    assert core.take_lora_digests() == []
