"""A request's ``priority`` on the wire decides when an engine built with that policy runs it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.worker.config.batch import SCHEDULING_POLICIES
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.offline.run import OfflineRequest, run_workload

from ..harness import generate, request

ORDERS = {"fcfs": ["a", "b", "c", "d"], "priority": ["d", "b", "c", "a"]}
PRIORITIES = {"a": 2, "b": 0, "c": 0, "d": -1}


def with_priority(message: EngineCoreRequest, priority: int) -> EngineCoreRequest:
    """The message as an engine core receives it."""
    sent = msgspec.msgpack.encode(msgspec.structs.replace(message, priority=priority))
    return msgspec.msgpack.decode(sent, type=EngineCoreRequest)


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_requests_run_in_the_order_of_the_policy(make_core: Callable[..., EngineCore], policy: str) -> None:
    core = make_core("llama", max_num_seqs=1, scheduling_policy=policy)
    for request_id, priority in PRIORITIES.items():
        core.add_request(with_priority(request(request_id, [5, 6, 7], max_tokens=3), priority))
    finished = []
    while core.has_work:
        finished += [output.request_id for output in core.step_fn() if output.finished]
        core.check_invariants()
    assert finished == ORDERS[policy]


def test_preemption_by_priority_changes_no_token(
    make_core: Callable[..., EngineCore], prompts: list[list[int]]
) -> None:
    alone = make_core("llama")
    expected = {
        str(i): generate(alone, [request(str(i), prompt, max_tokens=20)])[str(i)] for i, prompt in enumerate(prompts)
    }
    core = make_core("llama", num_blocks=18, block_size=4, max_model_len=64, scheduling_policy="priority")
    requests = [with_priority(request(str(i), prompt, max_tokens=20), -(i % 3)) for i, prompt in enumerate(prompts)]
    assert generate(core, requests) == expected
    assert core.scheduler.stats().num_preemptions > 0


def test_a_workload_may_have_priorities(make_core: Callable[..., EngineCore], monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core("llama", max_num_seqs=1, scheduling_policy="priority")
    finished: list[str] = []
    step = core.step_fn

    def watched_step() -> list[EngineCoreOutput]:
        outputs = step()
        finished.extend(output.request_id for output in outputs if output.finished)
        return outputs

    monkeypatch.setattr(core, "step_fn", watched_step)
    params = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
    run_workload(core, [OfflineRequest([5], params, priority=priority) for priority in PRIORITIES.values()], load_s=0.0)
    assert finished == ["3", "1", "2", "0"]
