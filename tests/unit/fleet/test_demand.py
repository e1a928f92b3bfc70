"""A fleet's demand by the queue and by heartbeats."""

from __future__ import annotations

import msgspec

from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.keys import Keys
from penstock.shared.messages.supervision import EngineState
from penstock.shared.queue.stats import QueueStats
from penstock.worker.fleet.demand import Demand, DemandSnapshot
from penstock.worker.fleet.scaling import Load

QUEUE = QueueStats(
    model="m",
    paused_at=None,
    depth=7,
    num_tokens=700,
    num_running=5,
    num_returned=1,
    oldest_age_s=1.0,
    estimated_wait_s=12.0,
    requests_per_s=1.0,
    tokens_per_s=60.0,
    mean_output_tokens=9.0,
    bands=[],
    num_engines=3,
    full_tokens_per_s=60.0,
)


def beat(worker_id: str, running: int, kv_cache_usage: float = 0.0, waiting: int = 0) -> EngineHeartbeat:
    return EngineHeartbeat(
        worker_id=worker_id,
        engine_id=f"{worker_id}-0",
        model="m",
        state=EngineState.BUSY,
        host="h",
        worker_pid=1,
        core_pid=2,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        kv_cache_usage=kv_cache_usage,
    )


# The second worker is called as the first, on another host with another process id.
SERVING = [beat("m-ray-0-12-ab", 2, 0.75), beat("m-ray-0-123-cd", 8), beat("elsewhere-9-ef", 1, 0.125, waiting=3)]


def demand() -> Demand:
    return Demand(CommandConnection("redis://nowhere"), Keys(), "m", max_num_seqs=8)


def test_load_combines_waiting_requests_and_use_of_engines() -> None:
    """An engine is as full as its cache or its batch, whichever is fuller."""
    assert demand().load(DemandSnapshot(QUEUE, SERVING), ["m-ray-0-12-"]) == Load(
        num_waiting=7,
        num_running=5,
        backlog_s=700 / 20,
        num_serving=3,
        num_others=2,
        busy=0.75 + 1.0 + 0.125,
    )


def test_a_fleet_without_engines_remembers_how_fast_one_was() -> None:
    rule = demand()
    rule.load(DemandSnapshot(QUEUE, SERVING), [])
    unserved = msgspec.structs.replace(QUEUE, num_engines=0, full_tokens_per_s=0.0)
    assert rule.load(DemandSnapshot(unserved, []), []).backlog_s == 700 / 20
    assert demand().load(DemandSnapshot(unserved, []), []).backlog_s is None


def test_engines_that_just_started_count_like_others() -> None:
    """The speed is that of all engines which claim, so one that begins adds its part at once."""
    more = msgspec.structs.replace(QUEUE, num_engines=6, full_tokens_per_s=120.0)
    assert (
        demand().load(DemandSnapshot(more, SERVING), []).backlog_s
        == demand().load(DemandSnapshot(QUEUE, SERVING), []).backlog_s
    )


def test_without_own_engines_all_engines_are_others() -> None:
    assert demand().load(DemandSnapshot(QUEUE, SERVING), []).num_others == 3


def test_a_paused_queue_needs_no_engines() -> None:
    paused = msgspec.structs.replace(QUEUE, paused_at=5.0)
    assert demand().load(DemandSnapshot(paused, []), []).num_waiting == 0


def test_requests_of_a_worker_run_or_wait_in_its_engines() -> None:
    snapshot = DemandSnapshot(QUEUE, SERVING)
    assert [snapshot.num_held_by(prefix) for prefix in ("m-ray-0-12-", "m-ray-0-123-", "elsewhere-9-", "gone-1-")] == [
        2,
        8,
        4,
        0,
    ]
