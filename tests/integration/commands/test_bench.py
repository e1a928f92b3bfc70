"""The rows about the queue are measured and printed; what they say is for a quiet machine to tell."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any

import psutil
import pytest
import redis
from rich.console import Console

from penstock.ops.lab.bench.command import QUEUE_ROWS, ROWS, chosen_rows
from penstock.ops.lab.bench.queue import scale as queue_scale
from penstock.ops.lab.bench.queue.enqueue import measure_enqueue
from penstock.ops.lab.bench.queue.report import QueueRows, measured_rows, queue_table
from penstock.ops.lab.bench.queue.scale import measure_scale
from penstock.ops.local.stack import private_redis
from penstock.shared.process.command_line import UsageError


def printed(rows: QueueRows) -> str:
    console = Console(file=io.StringIO(), width=200)
    for name in measured_rows(rows):
        console.print(queue_table(name, rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_enqueue() -> None:
    row = measure_enqueue(rounds=1, size=0.02)
    has_arq = find_spec("arq") is not None  # the rival of the first two
    with private_redis(append_only=False) as url, redis.Redis.from_url(url) as server:
        info: Any = server.info("server")
    has_streaq = find_spec("streaq") is not None and int(info["redis_version"].split(".")[0]) >= 7
    assert [bool(pairing.ratio) for pairing in row.pairings] == [has_arq, has_arq, has_streaq, True]
    assert all((pairing.rival_cost is None) == (pairing.ratio is None) for pairing in row.pairings)
    assert all(pairing.cost is not None and pairing.cost.client_us > 0 for pairing in row.pairings)
    assert "submit_many" in printed(QueueRows(enqueue=row))


def test_a_deep_queue_is_measured() -> None:
    row = measure_scale(300, num_repeats=3)
    assert not row.skipped
    assert row.redis_bytes_per_request > row.payload_bytes
    assert {"enqueue 1", "claim 1", "claim 16"} <= {cost.operation for cost in row.operations}
    assert all(cost.ratio > 0 and cost.empty_server_p50_us > 0 for cost in row.operations)
    assert "claim 16" in printed(QueueRows(scale=row))


def test_a_queue_that_does_not_fit_into_memory_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_scale, "EXPECTED_BYTES", psutil.virtual_memory().total)
    row = measure_scale(1000)
    assert "choose a smaller --queue-depth" in row.skipped
    assert "1,000 requests" in printed(QueueRows(scale=row))


def test_rows_are_chosen_by_name() -> None:
    assert chosen_rows("") == set(ROWS)
    assert chosen_rows("queue") == set(QUEUE_ROWS)
    assert chosen_rows("recovery, idle") == {"recovery", "idle"}
    with pytest.raises(UsageError, match="got 'queues'"):
        chosen_rows("idle,queues")
