"""An engine of two stages of two ranks each, in processes of their own: what it says is what one rank says, whatever is
asked, and calls, aborts and the end of a rank come between its batches."""

from __future__ import annotations

import os
import signal

import msgspec
import pytest

from penstock.shared.control.engine import CheckInvariants, Invariants, Sleep, SleepState, WakeUp
from penstock.shared.messages.core import AbortRequests, EngineCoreOutput, EngineCoreOutputs, Ready, UtilityCall
from penstock.worker.engine.composition import build_engine

from ....conftest import DEMO_MODEL
from ..adapters.peft_folders import lora_request
from ..harness import CoreProcess, request
from ..mixed_load import KINDS, NUM_TOO_MANY, assert_equal, config, requests, run

# Of those that are too many for the cache, as many as are: four of six blocks each, of sixteen.
NUM_LONG = 4
# The KV cache of a rank is a quarter of that of one that has all.
STAGES = config(tensor_parallel_size=2, pipeline_parallel_size=2, kv_cache_memory=16 * 16 * 512, enable_lora=True)
ADAPTERS = DEMO_MODEL.parent / "adapters"


def served(core: CoreProcess, names: list[str]) -> tuple[dict[str, EngineCoreOutput], int]:
    """Return what each request is given, and how many were preempted."""
    wholes = {name: EngineCoreOutput(name) for name in names}
    num_preemptions = 0
    while any(whole.finish_reason is None for whole in wholes.values()):
        message = core.receive()
        assert isinstance(message, EngineCoreOutputs)
        if message.scheduler_stats is not None:
            num_preemptions = message.scheduler_stats.num_preemptions
        for output in message.outputs:
            assert output.error is None, output.error
            whole = wholes[output.request_id]
            assert whole.finish_reason is None, "an ended request spoke"
            whole.new_token_ids = whole.new_token_ids + output.new_token_ids
            whole.new_logprobs = whole.new_logprobs + output.new_logprobs
            whole.new_prompt_logprobs = whole.new_prompt_logprobs + output.new_prompt_logprobs
            whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
    return wholes, num_preemptions


def receive_for_ever(core: CoreProcess) -> None:
    while True:
        core.receive()


def test_a_life_of_two_stages(core_process: CoreProcess) -> None:
    core, load = core_process, requests()
    load = [*load[:NUM_LONG], *load[NUM_TOO_MANY:][-4 * len(KINDS) :][: len(KINDS)]]
    adapters = [lora_request(folder, number) for number, folder in enumerate(sorted(ADAPTERS.iterdir()), 1)]
    load += [
        msgspec.structs.replace(new, request_id=f"{adapter.lora_name} {new.request_id}", lora_request=adapter)
        for adapter, new in zip(adapters, load, strict=False)
    ]
    expected = run(build_engine(config(enable_lora=True), DEMO_MODEL).core, list(load))
    ready = core.start(STAGES.encode())
    assert isinstance(ready, Ready), ready
    for new in load:
        core.send(new)
    found, num_preemptions = served(core, [new.request_id for new in load])
    assert_equal(found, expected)
    assert num_preemptions > 0

    names = [str(number) for number in range(6)]
    for number, name in enumerate(names):
        core.send(request(name, [5 + number] * 20, max_tokens=60))
    core.send(UtilityCall(1, CheckInvariants()))
    core.send(AbortRequests(names))
    core.send(UtilityCall(2, Sleep(level=1)))
    told = core.answer()
    assert isinstance(told.answer, Invariants), told.error
    assert core.answer().error is None, "nothing was in flight, and nobody was left"
    assert core.call(WakeUp()).answer == SleepState()
    core.send(load[0])
    again, _ = served(core, [load[0].request_id])
    assert again[load[0].request_id].new_token_ids == expected[load[0].request_id].new_token_ids

    for name in names:
        core.send(request(name, [5] * 20, max_tokens=100))
    assert ready.ranks is not None
    assert core.call(CheckInvariants()).error is None, "all has been read that was sent"
    os.kill(ready.ranks.pids[3], signal.SIGKILL)
    words = rf"RankKilledError: rank 3 \(process {ready.ranks.pids[3]}\) was killed by SIGKILL"
    with pytest.raises(EOFError, match=words):
        receive_for_ever(core)
