"""``penstock requests`` and ``penstock queue history`` against what the test's own broker calls have made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import msgspec
import pytest

from penstock.ops import cli as penstock_cli
from penstock.shared.broker import Broker, EngineCapacity, FinalRecord
from penstock.shared.broker.series import SeriesStore
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, RequestError
from penstock.shared.process.command_line import EXIT_FAILED, EXIT_USAGE


async def live(url: str, namespace: str) -> None:
    """Build a queue where one request fails, one runs and two wait, and something was counted."""
    connection, keys = CommandConnection(url), Keys(namespace)
    await connection.execute("HSET", keys.models(), "m", msgspec.json.encode(ModelCard(model="m")))
    broker = Broker(connection, keys.model("m"))
    for request_id in ("bad", "run"):
        await broker.enqueue(request_id, b"p", result_ttl_ms=60_000, tenant="shop")
    bad, _ = (await broker.claim("host-1-0", EngineCapacity(max_num_seqs=2))).claims
    error = RequestError("context_length_exceeded", "the prompt 'my secret' is too long")
    delta = Delta(index=0, finish_reason=FinishReason.ERROR, error=error)
    assert await broker.finish([FinalRecord("bad", bad.epoch, delta)]) == []
    for request_id in ("wait-1", "wait-2"):
        await broker.enqueue(request_id, b"p", result_ttl_ms=60_000, tenant="other")
    await SeriesStore(connection, broker.keys).add("w", 1, {"tokens_out": 600, "ended:failed": 1})
    await connection.close()


@pytest.fixture
def penstock(redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``penstock ...`` in this process; returns status, output and errors."""
    asyncio.run(live(redis_url, namespace))

    def run(*arguments: str) -> tuple[int, str, str]:
        status = penstock_cli.main([*arguments, "--redis-url", redis_url, "--namespace", namespace])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def ids(told: str) -> list[str]:
    return [request["request_id"] for request in json.loads(told)]


def test_lists_are_filtered(penstock) -> None:
    listed = ("requests", "list", "--json")
    assert set(ids(penstock(*listed)[1])) == {"bad", "run", "wait-1", "wait-2"}
    assert ids(penstock(*listed, "--state", "failed", "--tenant", "shop", "--since", "1h")[1]) == ["bad"]
    assert ids(penstock(*listed, "--state", "waiting")[1]) == ["wait-1", "wait-2"]
    assert ids(penstock(*listed, "--engine", "host-1-0", "--state", "running")[1]) == ["run"]
    assert "context_length_exceeded" in penstock("requests", "list", "--state", "failed")[1]
    assert penstock("requests", "list", "--tenant", "nobody")[1] == "no such requests\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--state", "lost"), "states must be of waiting, running"), (("--limit", "0"), "limit must be an integer")],
)
def test_impossible_values_are_refused(penstock, arguments, message) -> None:
    status, _, error = penstock("requests", "list", *arguments)
    assert (status, message in error, "Traceback" in error) == (EXIT_FAILED, True, False)


def test_show_prints_the_timeline_without_contents(penstock) -> None:
    status, told, _ = penstock("requests", "show", "bad")
    assert status == 0
    assert [word for word in ("queued", "claimed", "failed") if word in told] == ["queued", "claimed", "failed"]
    assert "secret" not in told
    found = json.loads(penstock("requests", "show", "bad", "--json")[1])
    assert [event["kind"] for event in found["events"]] == ["queued", "claimed", "failed"]
    assert found["request"]["cause"] == "context_length_exceeded"
    status, _, error = penstock("requests", "show", "nobody")
    assert (status, "has no request 'nobody'" in error) == (EXIT_FAILED, True)


def test_many_are_cancelled_after_a_question(penstock) -> None:
    status, _, error = penstock("requests", "cancel", "--tenant", "other")
    assert (status, "cancel 2 requests?" in error) == (EXIT_USAGE, True)
    assert penstock("requests", "cancel")[0] == EXIT_USAGE
    assert penstock("requests", "cancel", "--state", "failed", "--yes")[0] == EXIT_FAILED
    assert penstock("requests", "cancel", "--tenant", "other", "--yes")[1] == "2 cancelled\n"
    assert penstock("requests", "cancel", "--tenant", "other", "--yes")[1] == "0 cancelled\n"
    assert set(ids(penstock("requests", "list", "--state", "cancelled", "--json")[1])) == {"wait-1", "wait-2"}
    assert ids(penstock("requests", "list", "--state", "running", "--json")[1]) == ["run"]


def test_many_are_retried_after_a_question(penstock) -> None:
    assert penstock("requests", "cancel", "--tenant", "other", "--yes")[0] == 0
    status, _, error = penstock("requests", "retry", "--tenant", "other")
    assert (status, "queue 2 requests again, from their prompts?" in error) == (EXIT_USAGE, True)
    assert penstock("requests", "retry")[0] == EXIT_USAGE
    assert penstock("requests", "retry", "--state", "running", "--yes")[0] == EXIT_FAILED
    assert penstock("requests", "retry", "--until", "1h", "--yes")[1].startswith("0 queued again")
    assert penstock("requests", "retry", "--state", "cancelled", "--yes")[1].startswith("2 queued again")
    assert ids(penstock("requests", "list", "--state", "waiting", "--json")[1]) == ["wait-1", "wait-2"], (
        "in their order"
    )
    assert ids(penstock("requests", "list", "--until", "2020-01-01", "--json")[1]) == []
    status, _, error = penstock("requests", "list", "--until", "soon")
    assert (status, "until must be an age or a time of UTC" in error) == (EXIT_FAILED, True)


def test_queue_history_prints_the_counted_tokens(penstock) -> None:
    points = json.loads(penstock("queue", "history", "m", "--hours", "1", "--json")[1])
    assert len(points) == 60
    assert sum(point["tokens_out"] for point in points) == 600
    assert "10.0" in penstock("queue", "history", "m")[1]
    status, _, error = penstock("queue", "history", "m", "--hours", "0")
    assert (status, "hours must be a number above 0" in error) == (EXIT_FAILED, True)


def test_the_policy_limits_the_number_of_stored_events(penstock) -> None:
    assert penstock("queue", "configure", "m", "--events-kept", "0")[0] == 0
    assert "none are written" in penstock("queue", "show", "m")[1]
    assert penstock("queue", "configure", "m", "--events-kept", "20000001")[0] == EXIT_FAILED
