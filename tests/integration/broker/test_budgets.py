"""Budgets in the scripts: refusals at the enqueue and the claim, periods, and the amounts of several models."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec
import pytest

from penstock.shared.broker import Broker, Claim, Entry, FinalRecord
from penstock.shared.broker.script import PARTS
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.errors import InsufficientQuotaError, ValidationError
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.messages.requests import InputChunk
from penstock.shared.partitions import budgets as budgets_module
from penstock.shared.partitions.budgets import BudgetStore, sync_budgets
from penstock.shared.queue.budgets import Budget, BudgetState, Period, Price, Unit

from .conftest import TTL_MS, enqueue, take


class Deployment:
    """Two models, and the budgets of their tenants."""

    def __init__(self, commands: CommandConnection, namespace: str) -> None:
        self.commands, self.keys = commands, Keys(namespace)
        self.store = BudgetStore(commands, self.keys)
        self.brokers = {model: Broker(commands, self.keys.model(model)) for model in ("m", "other")}

    async def set(self, **fields: object) -> None:
        await self.store.set_budget(Budget(**{"tenant": "acme", "limit": 100.0, **fields}))
        await sync_budgets(self.commands, self.keys)

    async def refusal(
        self, model: str = "m", *, tenant: str = "acme", key_name: str = ""
    ) -> InsufficientQuotaError | None:
        entry = Entry(
            request_id=f"probe-{time.monotonic()}", payload=b"p", result_ttl_ms=TTL_MS, tenant=tenant, key_name=key_name
        )
        (answer,) = await self.brokers[model].enqueue_many([entry])
        if isinstance(answer, InsufficientQuotaError):
            return answer
        assert answer == "new"
        await self.brokers[model].cancel(entry.request_id)
        return None

    async def start(self, request_id: str, model: str = "m", **options: object) -> Claim:
        await enqueue(self.brokers[model], request_id, tenant="acme", **options)
        (claim,) = await take(self.brokers[model], "e0", 1)
        return claim

    async def end(self, claim: Claim, num: int, model: str = "m") -> None:
        """End a request with this many tokens of prompt, a tenth of them cached, and as many of output."""
        delta = Delta(token_ids=[1] * num, finish_reason=FinishReason.STOP, usage=Usage(num, num, num // 10))
        assert await self.brokers[model].finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []

    async def spent(self) -> list[float]:
        return [state.spent for state in await sync_budgets(self.commands, self.keys)]


@pytest.fixture
async def deployment(commands: CommandConnection, namespace: str) -> Deployment:
    for model in ("m", "other"):
        await commands.execute("HSET", Keys(namespace).models(), model, msgspec.json.encode(ModelCard(model=model)))
    return Deployment(commands, namespace)


async def test_a_used_up_budget_refuses_until_its_renewal(deployment: Deployment) -> None:
    await deployment.set(period=Period.DAY)
    claim = await deployment.start("a")
    assert await deployment.refusal() is None
    await deployment.end(claim, 50)
    refusal = await deployment.refusal()
    assert refusal is not None
    assert "the budget of tenant 'acme' is used up: 100 tokens per day; it is renewed in" in str(refusal)
    now = datetime.now(UTC)
    assert refusal.retry_after_s == pytest.approx(86400 - (now.timestamp() % 86400), abs=5)
    assert await deployment.refusal(tenant="shop") is None
    await deployment.set(period=Period.DAY, limit=101.0)
    assert await deployment.refusal() is None
    assert await deployment.spent() == [100.0]


async def test_running_requests_finish_and_waiting_ones_end(deployment: Deployment) -> None:
    """Only what ran when the budget was used up exceeds it."""
    await deployment.set()
    broker = deployment.brokers["m"]
    first, second = await deployment.start("a"), await deployment.start("b")
    await enqueue(broker, "waiting", "waiting too", tenant="acme")
    await enqueue(broker, "theirs", tenant="shop")
    await deployment.end(first, 60)
    assert [claim.request_id for claim in await take(broker, "e1", 9)] == ["theirs"]
    for request_id in ("waiting", "waiting too"):
        (end,) = await broker.read_log(request_id)
        assert (end.error and end.error.code, await broker.state(request_id)) == ("insufficient_quota", "failed")
    await deployment.end(second, 30)
    assert await deployment.spent() == [180.0]
    assert await broker.release([]) == 0


async def test_a_small_limit_is_readable_in_errors(deployment: Deployment) -> None:
    await deployment.set(limit=0.0000421)
    claim = await deployment.start("a")
    await enqueue(deployment.brokers["m"], "waiting", tenant="acme")
    await deployment.end(claim, 5)
    assert "0.0000421 tokens per month;" in str(await deployment.refusal())
    assert await take(deployment.brokers["m"], "e0", 1) == []
    (end,) = await deployment.brokers["m"].read_log("waiting")
    assert end.error is not None
    assert end.error.message == "the budget of its tenant is used up: 0.0000421 tokens per month"


async def test_a_request_that_died_with_its_engine_resumes(deployment: Deployment) -> None:
    await deployment.set()
    broker = deployment.brokers["m"]
    first, second = await deployment.start("a"), await deployment.start("b")
    await broker.release([("b", second.epoch)])
    await deployment.end(first, 60)
    (claim,) = await take(broker, "e1", 9)
    assert claim.request_id == "b"


async def test_a_budget_of_a_key_limits_this_key(deployment: Deployment) -> None:
    await deployment.set(key_name="web")
    await deployment.end(await deployment.start("a", key_name="web"), 60)
    refusal = await deployment.refusal(key_name="web")
    assert refusal is not None
    assert "this API key of tenant 'acme'" in str(refusal)
    assert await deployment.refusal(key_name="app") is None
    assert await deployment.refusal() is None


async def test_costs_are_by_the_prices_of_each_model(deployment: Deployment) -> None:
    prices = {"m": Price(input=2e6, cached=1e6, output=10e6), "*": Price(output=5e6)}
    await deployment.set(unit=Unit.COST, prices=prices, limit=1000.0)
    await deployment.end(await deployment.start("a"), 10)
    assert await deployment.spent() == [9 * 2 + 1 + 10 * 10]
    await deployment.end(await deployment.start("b", "other"), 10, "other")
    assert await deployment.spent() == [119 + 50]


async def test_models_share_a_budget(deployment: Deployment) -> None:
    await deployment.set()
    await deployment.end(await deployment.start("a", "other"), 60, "other")
    assert await deployment.refusal("other") is not None
    assert await deployment.spent() == [120.0]
    assert await deployment.refusal("m") is not None


async def test_a_new_budget_counts_its_period_by_the_ledger(deployment: Deployment) -> None:
    await deployment.end(await deployment.start("a", key_name="web"), 60)
    await deployment.set(period=Period.DAY)
    await deployment.set(period=Period.MONTH, key_name="app")
    await deployment.set(period=Period.ALL)
    assert await deployment.spent() == [0.0, 120.0, 0.0]  # "all" counts from when it was set
    assert await deployment.refusal() is not None


async def test_refusals_begin_with_the_end_that_uses_a_budget_up(deployment: Deployment) -> None:
    """Whatever is left of several budgets, which the scripts count together until the first may be used up."""
    limits, prices = {"": 50.0, "app": 25.0, "web": 16.0}, {"*": Price(input=1e6, cached=1e6, output=3e6)}
    spent = dict.fromkeys(limits, 0.0)
    for key_name, limit in limits.items():
        is_cost = key_name == "app"
        how = {"unit": Unit.COST, "prices": prices} if is_cost else {}
        await deployment.set(key_name=key_name, limit=limit, period=Period.DAY, **how)
    for number, key_name in enumerate(
        ["web", "app", "", "web", "web", "app", "", "web", "app", "web", "app", "", "app"]
    ):
        is_refused = any(spent[name] >= limits[name] for name in {"", key_name})
        assert (await deployment.refusal(key_name=key_name) is not None) == is_refused, (number, spent)
        if is_refused:
            continue
        num_tokens = 1 + number % 4
        await deployment.end(await deployment.start(f"r{number}", key_name=key_name), num_tokens)
        spent[""] += 2 * num_tokens
        if key_name:
            spent[key_name] += 2 * num_tokens * (2 if key_name == "app" else 1)
    assert await deployment.spent() == list(spent.values())


async def test_a_past_period_is_forgotten(deployment: Deployment, commands: CommandConnection) -> None:
    await deployment.set(period=Period.DAY)
    key = deployment.keys.model("m").prefix + "budget_spent"
    await commands.execute("HSET", key, "acme\n\nday", "86400 500 500")
    assert await deployment.refusal() is None
    await deployment.end(await deployment.start("a"), 10)
    assert await deployment.spent() == [20.0]


async def test_without_budgets_supervisors_compare_nothing(
    deployment: Deployment, commands: CommandConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until one is set, also if that is while a supervisor writes that there is none."""
    calls: list[int] = []

    async def sync(connection: CommandConnection, keys: Keys) -> list[BudgetState]:
        states = await sync_budgets(connection, keys)
        calls.append(len(states))
        if len(calls) == 3:
            await deployment.store.set_budget(Budget(tenant="acme", limit=30.0))
        return states

    async def passes_second() -> list[int]:
        await commands.execute("DEL", deployment.keys.budgets_synced())
        await budgets_module.sync_if_due(commands, deployment.keys)
        return calls

    monkeypatch.setattr(budgets_module, "sync_budgets", sync)
    assert await passes_second() == []
    await deployment.store.set_budget(Budget(tenant="acme", limit=9.0))
    assert await passes_second() == [1]
    await deployment.store.remove_budget("acme\n\nmonth")
    assert await passes_second() == [1, 0]
    assert await passes_second() == [1, 0]
    await deployment.store.remove_budget("acme\n\nmonth")
    assert await passes_second() == [1, 0, 0]
    assert await passes_second() == [1, 0, 0, 1]
    await deployment.end(await deployment.start("a"), 20)
    assert await deployment.refusal() is not None


async def test_removed_budgets_refuse_nothing(deployment: Deployment) -> None:
    await deployment.set()
    await deployment.end(await deployment.start("a"), 60)
    assert await deployment.store.remove_budget("acme\n\nmonth")
    assert not await deployment.store.remove_budget("acme\n\nmonth")
    assert await deployment.spent() == []
    assert await deployment.refusal() is None


@pytest.mark.parametrize("name", ["budgets", "budget_spent", "budget_left"])
async def test_foreign_data_stops_nothing(deployment: Deployment, commands: CommandConnection, name: str) -> None:
    await deployment.set()
    key = deployment.keys.model("m").prefix + name
    await commands.execute("HSET", key, "acme\n\nmonth", "foreign")
    await deployment.end(await deployment.start("a"), 10)
    await commands.execute("SET", key, "foreign")
    await deployment.end(await deployment.start("b"), 10)
    assert await deployment.refusal() is None
    assert await deployment.spent() == [40.0]


async def test_a_conversation_takes_no_more_input(deployment: Deployment) -> None:
    await deployment.set()
    await deployment.start("a", is_resumable=True)
    await deployment.end(await deployment.start("b"), 60)
    with pytest.raises(InsufficientQuotaError, match="tenant of request 'a' is used up"):
        await deployment.brokers["m"].input.extend("a", 1, InputChunk(prompt="b"))


@pytest.mark.parametrize("day", ["2024-02-29", "2024-03-01", "2025-12-31", "2026-01-31", "2100-02-28", "2000-02-29"])
async def test_months_are_those_of_the_calendar(commands: CommandConnection, day: str) -> None:
    """The script's arithmetic against Python's, at times that no test waits for."""

    now = int(datetime.fromisoformat(f"{day}T23:59:59+00:00").timestamp())
    text = PARTS["budgets"].replace("-- uses: lib", "") + "\nlocal a, b = open_budgets().bounds('month') return {a, b}"
    start, end = await commands.execute("EVAL", f"local function now_s() return {now} end\n{text}", 0)
    assert (start, end) == Period.MONTH.bounds(now)


@pytest.mark.parametrize(
    ("fields", "message"), [({"limit": 0.0}, "limit must be"), ({"unit": Unit.COST}, "needs prices")]
)
async def test_invalid_budgets_are_refused(deployment: Deployment, fields: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        await deployment.set(**fields)
