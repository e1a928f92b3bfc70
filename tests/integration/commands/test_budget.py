"""``penstock budget``, and the webhook events of budgets, against a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.ops import cli as penstock_cli
from penstock.producer.background.agenda import Agenda
from penstock.producer.jobs.budget_warnings import warn_of_budgets
from penstock.producer.jobs.context import JobContext
from penstock.producer.webhooks.event_store import EventStore
from penstock.producer.webhooks.events import EventState
from penstock.shared.broker import Broker, EngineCapacity, FinalRecord
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.audit import Audit
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.partitions.budgets import BudgetStore
from penstock.shared.process.command_line import EXIT_FAILED, EXIT_USAGE
from penstock.shared.queue.budgets import Budget, Period

URL = "https://hooks.example.org/budgets"


async def use(url: str, namespace: str, num: int) -> None:
    """Serve a request with this many tokens in all."""
    connection, keys = CommandConnection(url), Keys(namespace)
    await connection.execute("HSET", keys.models(), "m", msgspec.json.encode(ModelCard(model="m")))
    broker = Broker(connection, keys.model("m"))
    await broker.enqueue(f"r{num}", b"p", result_ttl_ms=60_000, tenant="acme", key_name="web")
    (claim,) = (await broker.claim("host-1-0", EngineCapacity(max_num_seqs=1))).claims
    delta = Delta(token_ids=[1] * 10, finish_reason=FinishReason.STOP, usage=Usage(num - 10, 10))
    assert await broker.finish([FinalRecord(f"r{num}", claim.epoch, delta)]) == []
    await connection.close()


@pytest.fixture
def penstock(redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``penstock ...`` in this process; returns status, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = penstock_cli.main([*arguments, "--redis-url", redis_url, "--namespace", namespace])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_budgets_are_set_shown_and_removed(penstock, redis_url: str, namespace: str, tmp_path: Path) -> None:
    asyncio.run(use(redis_url, namespace, 40))
    prices = tmp_path / "prices.toml"
    prices.write_text('[models."*"]\ninput = 1.0\noutput = 2.0\n')
    assert penstock("budget", "list")[1] == "no budgets are set\n"
    assert "40" in penstock("budget", "set", "acme", "--tokens", "100", "--per", "day")[1]
    status, out, _ = penstock("budget", "set", "acme", "--key", "web", "--cost", "0.001", "--prices", str(prices))
    assert (status, out.splitlines()[1].split()[:7]) == (
        0,
        ["acme", "web", "month", "0.00005", "0.001", "cost", "5%"],
    )
    states = json.loads(penstock("budget", "list", "--json")[1])
    assert [(state["budget"].get("key_name", ""), state["spent"]) for state in states] == [
        ("", 40.0),
        ("web", pytest.approx(50e-6)),
    ]
    assert penstock("budget", "remove", "acme", "--per", "day")[0] == 0
    assert penstock("budget", "remove", "acme", "--per", "day")[0] == EXIT_FAILED
    assert len(json.loads(penstock("budget", "list", "--json")[1])) == 1

    async def actions() -> list[str]:
        connection = CommandConnection(redis_url)
        entries = await Audit(connection, Keys(namespace)).read()
        await connection.close()
        return [entry.action for entry in entries]

    assert asyncio.run(actions()) == ["budget.remove", "budget.remove", "budget.set", "budget.set"]


def test_a_changed_limit_in_all_forgets_nothing_that_was_spent(penstock, redis_url: str, namespace: str) -> None:
    asyncio.run(use(redis_url, namespace, 20))
    assert penstock("budget", "set", "acme", "--tokens", "100", "--per", "all")[0] == 0
    first = json.loads(penstock("budget", "list", "--json")[1])[0]

    async def begin_a_day_before() -> None:
        connection = CommandConnection(redis_url)
        store, since = BudgetStore(connection, Keys(namespace)), first["budget"]["since"] - 86400
        await store.set_budget(Budget(tenant="acme", period=Period.ALL, limit=100.0, since=since))
        await connection.close()

    asyncio.run(begin_a_day_before())
    assert penstock("budget", "list")[0] == 0  # tells the partition
    asyncio.run(use(redis_url, namespace, 30))
    assert penstock("budget", "set", "acme", "--tokens", "200", "--per", "all")[0] == 0
    (state,) = json.loads(penstock("budget", "list", "--json")[1])
    assert (state["budget"]["since"], state["spent"]) == (first["budget"]["since"] - 86400, 30.0)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("acme", "--tokens", "0"), EXIT_FAILED, "limit must be positive"),
        (("acme", "--cost", "5"), EXIT_USAGE, "--cost needs --prices FILE"),
        (("acme", "--tokens", "5", "--webhook", URL), EXIT_FAILED, "webhook_url"),
        (("{acme}", "--tokens", "5"), EXIT_FAILED, "tenant must hold no braces"),
    ],
)
def test_wrong_budgets_are_refused(penstock, arguments: tuple[str, ...], status: int, message: str) -> None:
    code, _, errors = penstock("budget", "set", *arguments)
    assert (code, message in errors) == (status, True), errors


def test_each_threshold_is_reported_once(penstock, redis_url: str, namespace: str) -> None:
    assert penstock("webhook", "secret", "create", "--tenant", "acme")[0] == 0
    assert penstock("budget", "set", "acme", "--tokens", "100", "--webhook", URL)[0] == 0

    async def report() -> list[dict[str, Any]]:
        """Report as a jobs process that has just started, twice."""
        connection, keys = CommandConnection(redis_url), Keys(namespace)
        events = EventStore(connection, keys, Agenda(connection, keys))
        for _ in range(2):
            context = SimpleNamespace(connection=connection, keys=keys, events=events, budget_events=set())
            for _ in range(2):
                await warn_of_budgets(cast(JobContext, context))
        pending = await events.list(EventState.PENDING)
        await connection.close()
        return [json.loads(event.body) for event in pending]

    asyncio.run(use(redis_url, namespace, 79))
    assert asyncio.run(report()) == []
    asyncio.run(use(redis_url, namespace, 11))
    (warning,) = asyncio.run(report())
    assert (warning["type"], warning["data"]["spent"], warning["data"]["limit"]) == ("budget.warning", 90.0, 100.0)
    asyncio.run(use(redis_url, namespace, 12))
    assert [event["type"] for event in asyncio.run(report())] == ["budget.warning", "budget.exhausted"]
