"""Adapters of engines with two ranks: steps run while one rank still reads, and with models that read images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.ops.lab.survey.images.models import write_vision_model
from penstock.shared.control.engine import CollectiveRpc
from penstock.shared.control.model import AddLora
from penstock.shared.messages.core import Ready

from ..adapters.peft_folders import lora_request, write_adapter
from ..harness import CoreProcess, request
from ..images.test_image_adapters import TEXT_ALONE, asked, load_whole
from .test_ranks import ADAPTERS, PROMPTS, ask, start, started, tokens

# Rank 1 reads adapters only once the file of the argument exists.
HOLDING = """
import pathlib
import time
from penstock.worker.engine.ranks import adapters
from penstock.worker.engine.rpc import rpc_method

@rpc_method("hold_adapters")
def hold_adapters(engine, path, error=""):
    read = adapters.load_adapter

    def wait_and_read(*args):
        while not pathlib.Path(path).exists():
            time.sleep(0.01)
        if error:
            raise OSError(error)
        return read(*args)

    if engine.rank == 1:
        adapters.load_adapter = wait_and_read
"""


@pytest.fixture
def holding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module, which processes can import that are started afterwards."""
    (tmp_path / "holding_adapters.py").write_text(HOLDING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "holding_adapters"


@pytest.fixture
def other_core() -> Iterator[CoreProcess]:
    process = CoreProcess()
    yield process
    process.process.kill()
    process.close()


def test_steps_run_while_another_rank_reads_an_adapter(
    holding: str, core_process: CoreProcess, other_core: CoreProcess, demo_model: Path, tmp_path: Path
) -> None:
    adapter = lora_request(sorted(ADAPTERS.iterdir())[0])
    assert isinstance(start(other_core, demo_model, enable_lora=True), Ready)
    expected = tokens(other_core, adapter)

    started(core_process, demo_model, enable_lora=True, rpc_modules=(holding,))
    gate = tmp_path / "gate"
    ask(core_process, CollectiveRpc("hold_adapters", args=[str(gate)]))
    core_process.send(msgspec.structs.replace(request("adapted", PROMPTS[0]), lora_request=adapter))
    assert tokens(core_process) == expected[: len(PROMPTS)], "requests without the adapter are computed meanwhile"
    gate.touch()
    outputs = core_process.collect(1)["adapted"]
    assert [token for row in outputs for token in row.new_token_ids] == expected[len(PROMPTS)]
    assert tokens(core_process, adapter) == expected


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_adapters_of_a_model_that_reads_images_on_two_ranks(
    layout: dict[str, Any], core_process: CoreProcess, other_core: CoreProcess, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_vision_model("llava", model)
    adapter = write_adapter(tmp_path / "adapter", load_whole(model), TEXT_ALONE)

    def seen(core: CoreProcess) -> list[list[int]]:
        answers = []
        for name, chosen in (("plain", None), ("adapted", adapter)):
            core.send(asked(name, chosen))
            answers.append([token for row in core.collect(1)[name] for token in row.new_token_ids])
        return answers

    assert isinstance(start(other_core, model, enable_lora=True), Ready)
    expected = seen(other_core)
    assert expected[0] != expected[1]
    assert isinstance(start(core_process, model, enable_lora=True, **layout), Ready)
    assert seen(core_process) == expected


def test_an_adapter_that_a_rank_cannot_read_is_on_none(
    holding: str, core_process: CoreProcess, demo_model: Path, tmp_path: Path
) -> None:
    """The engine serves on without it."""
    started(core_process, demo_model, enable_lora=True, rpc_modules=(holding,))
    adapter = lora_request(sorted(ADAPTERS.iterdir())[0])
    ask(core_process, CollectiveRpc("hold_adapters", args=[str(tmp_path), "here alone"]))
    failed = core_process.call(AddLora(adapter))
    assert failed.error is not None
    assert "rank 1 failed: OSError: here alone" in failed.error.message
    assert tokens(core_process)
