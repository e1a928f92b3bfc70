"""A real engine core of two ranks: tokens, control calls and ends are those of one, and all end together."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.ops.lab.survey.images.models import write_vision_model
from penstock.ops.lab.survey.images.processors import PLACEHOLDER
from penstock.ops.lab.survey.images.truth import picture, png
from penstock.shared.control.calls import Utility
from penstock.shared.control.engine import (
    CollectiveRpc,
    DummyBatchDone,
    ExecuteDummyBatch,
    IsSleeping,
    ProfileSaved,
    Sleep,
    SleepState,
    StartProfile,
    StopProfile,
    WakeUp,
)
from penstock.shared.control.model import AddLora, ListLoras, ReloadWeights, RemoveLora, SaveShardedState
from penstock.shared.messages.core import RankSetup, Ready, Shutdown, StartupFailed
from penstock.shared.params.images import ImageInput
from penstock.shared.params.lora import LoRARequest
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.processes.process_tree import is_zombie

from ....conftest import DEMO_MODEL
from ....processes import DEADLINE_S, listening_at
from ....warm_python import WARM_PYTHON_VARIABLE
from ..adapters.peft_folders import lora_request
from ..harness import CoreProcess, request

SPOILING = """
from penstock.worker.engine.rpc import rpc_method

@rpc_method("spoil")
def spoil(engine):
    if engine.rank:
        return

    def run(step):
        raise ValueError("here alone")

    engine.model.forward.local.run = run
"""
METHODS = """
import torch
from penstock.worker.engine.rpc import rpc_method

@rpc_method("who")
def who(engine, word):
    return f"{word} {engine.rank}"

@rpc_method("scale", changes_model=True)
def scale(engine, factor, fails_in=None):
    with torch.inference_mode():
        for name, weight in engine.model.network.named_parameters():
            if "norm" in name:
                weight.mul_(factor)
    if engine.rank == fails_in:
        raise ValueError("scaled, and failed")

@rpc_method("fail")
def fail(engine, rank):
    if engine.rank == rank:
        raise ValueError("here alone")

@rpc_method("requests")
def requests(engine):
    return engine.core.num_unfinished_requests
"""
PROMPTS = [[5, 6, 7], [9] * 40]
WEIGHTS = "model.safetensors"
ADAPTERS = DEMO_MODEL.parent / "adapters"
ROOT = Path(__file__).parents[4]


def start(core: CoreProcess, model: Path, **options: Any) -> Any:
    config = EngineConfig(model=str(model), num_threads=1, max_num_seqs=4, kv_cache_memory=1 << 24, **options)
    return core.start(config.encode())


def started(core: CoreProcess, model: Path, **options: Any) -> RankSetup:
    ready = start(core, model, tensor_parallel_size=2, **options)
    assert isinstance(ready, Ready), ready
    assert ready.ranks is not None
    return ready.ranks


def tokens(core: CoreProcess, *adapters: LoRARequest) -> list[list[int]]:
    """Return the tokens of each prompt alone and with each adapter, computed together."""
    requests = [
        msgspec.structs.replace(request(f"{index} {number}", prompt), lora_request=adapter)
        for number, adapter in enumerate((None, *adapters))
        for index, prompt in enumerate(PROMPTS)
    ]
    for each in requests:
        core.send(each)
    outputs = core.collect(len(requests))
    return [[token for row in outputs[each.request_id] for token in row.new_token_ids] for each in requests]


def ask(core: CoreProcess, call: Utility) -> Any:
    output = core.call(call)
    assert output.error is None, output.error
    return output.answer


def receive_for_ever(core: CoreProcess) -> None:
    while True:
        core.receive()


def await_end(process: psutil.Process) -> None:
    give_up_at = time.monotonic() + 120
    while not is_zombie(process):
        assert time.monotonic() < give_up_at, "a rank lives on"
        time.sleep(0.01)


def with_other_weights(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    state = load_file(model / WEIGHTS)
    state["model.layers.1.input_layernorm.weight"] *= 2
    (folder / WEIGHTS).unlink()
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    return folder


@pytest.fixture
def other_core() -> Any:
    process = CoreProcess()
    yield process
    process.process.kill()
    process.close()


def test_a_life_of_two_ranks(
    core_process: CoreProcess, other_core: CoreProcess, demo_model: Path, tmp_path: Path
) -> None:
    model, core = tmp_path / "model", core_process
    model.mkdir()
    for path in demo_model.iterdir():
        if path.is_file():
            (model / path.name).symlink_to(path)
    assert isinstance(start(other_core, model, enable_lora=True, max_loras=2), Ready)
    expected = tokens(other_core)
    ranks = started(core, model, profile_dir=str(tmp_path / "profiles"), enable_lora=True, max_loras=2)
    assert (ranks.tensor_parallel_size, len(ranks.pids)) == (2, 2)
    assert len(set(ranks.weight_bytes)) == len(set(ranks.kv_cache_bytes)) == 1
    assert tokens(core) == expected

    assert ask(core, StartProfile()).folder == str(tmp_path / "profiles")
    assert isinstance(ask(core, ExecuteDummyBatch()), DummyBatchDone)
    assert isinstance(ask(core, StopProfile()), ProfileSaved)
    assert [path.name.count("-rank0-") for path in sorted((tmp_path / "profiles").iterdir())] == [1, 0]

    adapters, adapted = check_adapters(core, other_core, ranks)
    for level in (1, 2):
        assert ask(core, Sleep(level=level)) == SleepState(level, ["weights", "kv_cache", "adapters"])
        assert ask(core, WakeUp(["kv_cache"])) == SleepState(level, ["weights", "adapters"])
        assert ask(core, WakeUp()) == SleepState()
        assert tokens(core, *adapters) == adapted

    check_other_weights(core, other_core, model, tmp_path / "others", expected)
    check_saving(core, other_core, ranks, model, tmp_path / "saved", expected)
    check_a_wake_up_that_fails(core, model, tmp_path / "hidden", expected)
    rank = psutil.Process(ranks.pids[1])
    core.send(Shutdown())
    assert core.process.wait() == 0
    await_end(rank)


def check_adapters(
    core: CoreProcess, other_core: CoreProcess, ranks: RankSetup
) -> tuple[list[LoRARequest], list[list[int]]]:
    """Check that adapters are on all ranks or on none; return them, and the tokens with them."""
    adapters = [lora_request(folder, number) for number, folder in enumerate(sorted(ADAPTERS.iterdir()), 1)]
    # Without another descriptor the rank opens no file.
    before = resource.prlimit(ranks.pids[1], resource.RLIMIT_NOFILE)
    resource.prlimit(ranks.pids[1], resource.RLIMIT_NOFILE, (3, before[1]))
    failed = core.call(AddLora(adapters[0]))
    assert failed.error is not None
    assert failed.error.code == "adapter_file"
    assert "rank 1 failed" in failed.error.message
    assert ask(core, ListLoras()).lora_ids == []
    resource.prlimit(ranks.pids[1], resource.RLIMIT_NOFILE, before)
    adapted = tokens(other_core, *adapters)
    assert len({tuple(each) for each in adapted}) == len(adapted), "the adapters make no difference"
    assert tokens(core, *adapters) == adapted, "there are fewer slots than adapters"
    assert ask(core, RemoveLora(1)).success
    assert ask(core, ListLoras()).lora_ids == [2, 3]
    return adapters, adapted


def check_other_weights(
    core: CoreProcess, other_core: CoreProcess, model: Path, folder: Path, expected: list[list[int]]
) -> None:
    """Other weights for both ranks, or for none."""
    others = with_other_weights(model, folder)
    changed = [ask(one, ReloadWeights(path=str(others))) and tokens(one) for one in (other_core, core)]
    assert changed[0] == changed[1] != expected
    ask(core, Sleep(level=2))
    assert ask(core, WakeUp()) == SleepState(), "each reads its part of them again"
    (others / WEIGHTS).unlink()  # what was loaded of it is mapped
    (others / WEIGHTS).write_bytes(b"no weights")
    refused = core.call(ReloadWeights(path=str(others)))
    assert refused.error is not None
    assert tokens(core) == changed[0]
    ask(core, ReloadWeights(path=str(model)))
    assert tokens(core) == expected


def check_saving(
    core: CoreProcess,
    other_core: CoreProcess,
    ranks: RankSetup,
    model: Path,
    folder: Path,
    expected: list[list[int]],
) -> None:
    """Check that if a rank has no room to write, none leaves a part, and that saved files are whole for any ranks."""
    before = resource.prlimit(ranks.pids[1], resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    failed = core.call(SaveShardedState(str(folder)))
    assert failed.error is not None
    assert failed.error.code == "engine_state"
    assert "rank 1 failed" in failed.error.message
    assert "File too large" in failed.error.message
    resource.prlimit(ranks.pids[1], resource.RLIMIT_FSIZE, before)
    saved = ask(core, SaveShardedState(str(folder), max_size=1_000_000))
    assert len(saved.files) > 1
    assert {path.name for path in folder.iterdir()} - {path.name for path in model.iterdir()} == {
        *saved.files,
        "model.safetensors.index.json",
    }
    for one in (core, other_core):
        ask(one, ReloadWeights(path=str(folder)))
        assert tokens(one) == expected
    ask(core, ReloadWeights(path=str(model)))


def check_a_wake_up_that_fails(core: CoreProcess, model: Path, elsewhere: Path, expected: list[list[int]]) -> None:
    """Check that what cannot be had on any rank leaves all asleep, to be tried again."""
    ask(core, Sleep(level=2))
    hidden = (model / WEIGHTS).rename(elsewhere)
    failed = core.call(WakeUp())
    assert failed.error is not None
    assert WEIGHTS in failed.error.message or str(model) in failed.error.message
    assert ask(core, IsSleeping()).level == 2
    hidden.rename(model / WEIGHTS)
    assert ask(core, WakeUp()) == SleepState()
    assert tokens(core) == expected


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_two_ranks_that_read_images_sleep_and_change_their_weights(
    name: str, core_process: CoreProcess, tmp_path: Path
) -> None:
    """Includes the vision encoder, which only one rank has; saved files are complete."""
    core, model, place = core_process, tmp_path / "model", tmp_path / "saved"
    model.mkdir()
    write_vision_model(name, model)
    ranks = started(core, model)
    assert ranks.weight_bytes[0] > ranks.weight_bytes[1], "the first has the tower, too"

    def seen(seed: int) -> list[int]:
        asked = request("r", [*range(40, 61), PLACEHOLDER, *range(80, 87)])
        core.send(msgspec.structs.replace(asked, images=[ImageInput.from_bytes(png(picture(seed)))]))
        return [token for row in core.collect(1)["r"] for token in row.new_token_ids]

    expected = seen(1)
    assert seen(2) != expected
    for level in (1, 2):
        ask(core, Sleep(level=level))
        assert ask(core, WakeUp()) == SleepState()
        assert seen(1) == expected
    ask(core, SaveShardedState(str(place)))
    weights = load_file(model / WEIGHTS)
    saved: dict[str, Tensor] = {}
    for path in place.glob("*.safetensors"):
        saved |= load_file(path)
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[key], weight) for key, weight in weights.items())
    ask(core, ReloadWeights(path=str(place)))
    assert seen(1) == expected


def test_the_end_of_a_rank_is_the_end_of_an_idle_core(core_process: CoreProcess, demo_model: Path) -> None:
    ranks = started(core_process, demo_model)
    os.kill(ranks.pids[1], signal.SIGKILL)
    words = rf"RankKilledError: rank 1 \(process {ranks.pids[1]}\) was killed by SIGKILL"
    with pytest.raises(EOFError, match=words):
        receive_for_ever(core_process)
    assert core_process.process.returncode == 1


def test_a_failed_forward_on_rank_0_ends_the_engine_for_any_caller(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait in a collective; continuing would mix their sums with those of another step."""
    (tmp_path / "spoiling.py").write_text(SPOILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    core = CoreProcess()
    try:
        started(core, demo_model, rpc_modules=("spoiling",))
        ask(core, CollectiveRpc("spoil"))
        failed = core.call(ExecuteDummyBatch())
        assert failed.error is not None
        assert failed.error.code == "engine_dead"
        with pytest.raises(EOFError, match="rank 0: ValueError: here alone"):
            receive_for_ever(core)
    finally:
        core.process.kill()
        core.close()


@pytest.fixture
def rank_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module, which processes can import that are started afterwards."""
    (tmp_path / "rank_methods.py").write_text(METHODS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "rank_methods"


def test_methods_run_in_all_ranks(
    rank_methods: str, core_process: CoreProcess, other_core: CoreProcess, demo_model: Path
) -> None:
    """A method that changes weights does so on all ranks: tokens equal those of one rank after the same change."""
    assert isinstance(start(other_core, demo_model, rpc_modules=(rank_methods,)), Ready)
    ranks = started(core_process, demo_model, rpc_modules=(rank_methods,))
    before = tokens(other_core)
    assert tokens(core_process) == before
    assert ask(other_core, CollectiveRpc("who", args=["rank"])).result == "rank 0"
    assert ask(core_process, CollectiveRpc("who", args=["rank"])).result == ["rank 0", "rank 1"]
    assert [one["pid"] for one in ask(core_process, CollectiveRpc("device_info")).result] == ranks.pids
    memory = ask(core_process, CollectiveRpc("memory_summary")).result
    assert [one["kv_cache_bytes"] for one in memory] == ranks.kv_cache_bytes
    assert ask(core_process, CollectiveRpc("check_invariants")).result == [True, True]

    # Ranks of one host hear each other by its loopback interface.
    for pid in ranks.pids:
        assert {address.rpartition(":")[0] for address in listening_at(pid)} <= {"127.0.0.1"}

    # The same for both: what is not there, or takes other arguments, begins nowhere.
    for call, words in (
        (CollectiveRpc("whom"), "no RPC method 'whom' is registered"),
        (CollectiveRpc("who"), "RPC method 'who' does not take these arguments: missing a required argument: 'word'"),
    ):
        for core in (core_process, other_core):
            refused = core.call(call)
            assert refused.error is not None
            assert words in refused.error.message
    for call, words in (
        (CollectiveRpc("fail", args=[1]), "failed in rank 1: ValueError: here alone; it completed in rank 0"),
        (CollectiveRpc("fail", args=[0]), "failed in rank 0: ValueError: here alone; it completed in rank 1"),
        (CollectiveRpc("requests"), "rank 1: engine.core is of rank 0 alone"),
    ):
        failed = core_process.call(call)
        assert failed.error is not None
        assert failed.error.code == "engine_call_failed"
        assert words in failed.error.message
    assert ask(other_core, CollectiveRpc("requests")).result == 0

    scale = CollectiveRpc("scale", args=[3.0])
    assert (ask(other_core, scale).result, ask(core_process, scale).result) == (None, [None, None])
    changed = tokens(other_core)
    assert changed != before
    assert tokens(core_process) == changed

    torn = core_process.call(CollectiveRpc("scale", args=[3.0, 1]))
    assert torn.error is not None
    assert torn.error.code == "engine_dead"
    with pytest.raises(EOFError, match="failed in rank 1: ValueError: scaled, and failed"):
        receive_for_ever(core_process)


def test_ranks_end_with_a_core_that_is_killed(core_process: CoreProcess, demo_model: Path) -> None:
    """Covers a suspended rank, which cannot notice the death."""
    rank = psutil.Process(started(core_process, demo_model).pids[1])
    rank.suspend()
    core_process.process.kill()
    await_end(rank)


def test_an_option_no_rank_supports_is_refused_without_a_traceback(core_process: CoreProcess, demo_model: Path) -> None:
    failed = start(core_process, demo_model, tensor_parallel_size=5)
    assert isinstance(failed, StartupFailed)
    assert failed.code == "configuration_error"
    assert failed.trace == ""
    assert "tensor_parallel_size is 5" in failed.message


def test_nothing_is_written_into_files_that_were_opened_after_the_end() -> None:
    """torch's file of the ranks' meeting was opened by its number once more when it was destroyed."""
    python = os.environ.get(WARM_PYTHON_VARIABLE, sys.executable)
    command = [python, "-m", "tests.integration.engine.ranks.closed_engine", str(DEMO_MODEL)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "0"
