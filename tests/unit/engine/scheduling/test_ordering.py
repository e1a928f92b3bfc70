"""The order of a queue under each policy, and how a policy is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.errors import ConfigurationError
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.config.batch import SCHEDULING_POLICIES
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.scheduling.ordering import FirstComeFirstServed, OrderingPolicy, Priority, RequestQueue
from penstock.worker.engine.scheduling.request import Request


def make_queue(policy: OrderingPolicy, priorities: list[int]) -> tuple[RequestQueue, list[Request]]:
    """A queue to which one request after the other was added, and these."""
    queue, requests = RequestQueue(policy), []
    for index, priority in enumerate(priorities):
        request = Request(str(index), [1], SamplingParams(), max_model_len=10, priority=priority)
        request.arrival_index = index
        queue.add(request)
        requests.append(request)
    return queue, requests


@given(priorities=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2)), data=st.data())
def test_a_queue_keeps_the_order_of_its_policy(priorities: list[int], data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from([FirstComeFirstServed(), Priority()]))
    queue, requests = make_queue(policy, priorities)
    # Sorting is stable, so equals stay as they came.
    expected = requests if isinstance(policy, FirstComeFirstServed) else sorted(requests, key=lambda r: r.priority)
    assert list(queue) == expected
    if requests:
        ended = data.draw(st.sampled_from(requests))
        queue.remove(ended)
        assert list(queue) == [request for request in expected if request is not ended]
        queue.add(ended)
        assert list(queue) == expected, "whoever comes back gets its old place"
    queue.check_invariants()


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="scheduling_policy must be one of fcfs, priority, or MODULE:CLASS, got 'lifo'"
    ):
        EngineConfig(model="m", scheduling_policy="lifo")


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_the_policy_travels(policy: str) -> None:
    assert EngineConfig.decode(EngineConfig(model="m", scheduling_policy=policy).encode()).scheduling_policy == policy


def test_first_come_first_served_is_the_default() -> None:
    assert EngineConfig(model="m").scheduling_policy == "fcfs"
