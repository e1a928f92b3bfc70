"""A real engine core process: handshake, steps, aborts, bad messages, failed starts, and its end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.shared.control.engine import CheckInvariants, Invariants, PrefixCacheReset, ResetPrefixCache
from penstock.shared.messages.core import (
    AbortRequests,
    Hello,
    Ready,
    Shutdown,
    StartupFailed,
    UtilityCall,
    UtilityOutput,
)
from penstock.shared.messages.outcome import FinishReason
from penstock.worker.config.engine_config import EngineConfig

from ....processes import DEADLINE_S
from ..harness import SHAPE, CoreProcess, Gate, request, write_gated_model

OPTIONS: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 8, "max_model_len": 200}


def test_a_life_of_a_core(
    core_process: CoreProcess, model_folder: Callable[[str], Path], gate: Gate, tmp_path: Path
) -> None:
    folder = write_gated_model(tmp_path / "model", model_folder("llama"), gate)
    ready = core_process.start(EngineConfig(model=str(folder), trust_remote_code=True, **OPTIONS).encode())
    assert isinstance(ready, Ready)
    assert (ready.model_folder, ready.architecture) == (str(folder.resolve()), "GatedLlamaForCausalLM")
    assert (ready.max_model_len, ready.vocab_size, ready.eos_token_ids) == (200, SHAPE["vocab_size"], [2])
    assert (ready.dtype, ready.device, ready.block_size) == ("float32", "cpu", 16)
    assert ready.kv_cache_size_tokens == ready.num_blocks * 16
    assert ready.load_time_s > 0

    core_process.process.send_signal(signal.SIGINT)
    for index in range(3):
        core_process.send(request(str(index), [1, 6 + index], logit_bias={5: -100.0}))
    outputs = core_process.collect(3)
    assert [len(outputs[str(index)]) for index in range(3)] == [30, 30, 30]
    assert all(rows[-1].finish_reason == FinishReason.LENGTH for rows in outputs.values())

    core_process.send(request("endless", [1, 5], max_tokens=None))
    gate.await_arrival()
    core_process.send(request("too long", [1] * 200))
    core_process.send(request("unknown token", [SHAPE["vocab_size"]]))
    core_process.send(b"\xc1 is no msgpack")
    core_process.send(msgspec.msgpack.encode(["add", 1, "malformed", "not a list"]))
    core_process.send(UtilityCall(2, ResetPrefixCache()))
    core_process.send(AbortRequests(["endless", "never seen"]))
    core_process.send(AbortRequests(["endless"]))
    core_process.send(UtilityCall(3, ResetPrefixCache()))
    core_process.send(UtilityCall(4, CheckInvariants()))
    gate.open()
    answers: list[UtilityOutput] = []
    errors: dict[str, str] = {}
    while len(answers) < 3 or len(errors) < 3:
        message = core_process.receive()
        if isinstance(message, UtilityOutput):
            answers.append(message)
        else:
            errors |= {output.request_id: output.error.code for output in message.outputs if output.error is not None}
    assert errors == {
        "too long": "prompt_too_long",
        "unknown token": "validation_error",
        "malformed": "validation_error",
    }
    blocks = ready.num_blocks
    assert answers == [
        UtilityOutput(2, answer=PrefixCacheReset(False)),
        UtilityOutput(3, answer=PrefixCacheReset(True)),
        UtilityOutput(4, answer=Invariants(blocks, blocks, 0, 0)),
    ]
    core_process.send(Shutdown())
    assert core_process.process.wait(timeout=DEADLINE_S) == 0


def test_a_core_ends_with_its_worker(core_process: CoreProcess, model_folder: Callable[[str], Path]) -> None:
    assert isinstance(core_process.start(EngineConfig(model=str(model_folder("llama")), **OPTIONS).encode()), Ready)
    core_process.send(request("endless", [1, 2], max_tokens=None))
    assert "worker_process_gone" in core_process.close()
    assert core_process.process.returncode == 0


def test_a_core_with_an_abandoned_start_ends_without_output(core_process: CoreProcess) -> None:
    assert isinstance(core_process.receive(), Hello)
    assert core_process.close() == ""
    assert core_process.process.returncode == 0


@pytest.mark.parametrize(
    ("config_json", "code", "message"),
    [
        (b'{"model": "/no/such/folder"}', "model_load_error", "'/no/such/folder' does not exist"),
        (b'{"model": 5}', "configuration_error", "engine configuration"),
    ],
)
def test_a_failed_start_is_explained_without_a_trace(
    core_process: CoreProcess, config_json: bytes, code: str, message: str
) -> None:
    failed = core_process.start(config_json)
    assert isinstance(failed, StartupFailed)
    assert (failed.code, failed.trace) == (code, "")
    assert message in failed.message
    assert core_process.process.wait(timeout=DEADLINE_S) == 1
