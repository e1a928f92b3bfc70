"""The page of usage and budgets, against requests that were served."""

from __future__ import annotations

import msgspec

from penstock.ops.dashboard import Access, Role
from penstock.ops.views.words import cost, number, percent
from penstock.producer.control.usage import Prices
from penstock.shared.broker import EngineCapacity, FinalRecord
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.partitions.budgets import BudgetStore
from penstock.shared.queue.budgets import Budget, Period, Price

from .conftest import Site

URL = "https://hooks.example.org/x"


async def test_usage_is_grouped_and_budgets_show_their_share(site: Site) -> None:
    await site.broker.enqueue("a", b"p", result_ttl_ms=60_000, tenant="acme", key_name="web")
    (claim,) = (await site.broker.claim("host-1-0", EngineCapacity(max_num_seqs=1))).claims
    delta = Delta(token_ids=[1] * 1234, finish_reason=FinishReason.STOP, usage=Usage(4000, 1234, 500))
    assert await site.broker.finish([FinalRecord("a", claim.epoch, delta)]) == []
    await BudgetStore(site.connection, site.keys).set_budget(Budget(tenant="acme", limit=10468.0))
    visitor = await site.visitor()
    page = (await visitor.get("/usage?by=key")).text
    for text in ("acme", "web", number(1234), number(4000), percent(0.5)):
        assert text in page
    (row,) = (await visitor.get("/usage.json?by=key")).json()["rows"]
    assert (row["group"], row["name"], row["prompt"], row["cached"], row["output"]) == ("acme", "web", 4000, 500, 1234)
    assert row["cost"] is None
    assert 'class="hide-2"' in (await visitor.get("/usage?by=tenant")).text, "the rows have no second name"
    assert 'class="hide-2"' not in page
    assert "--prices FILE" in page
    prices = Prices(currency="EUR", models={"m": Price(input=2.0, cached=0.5, output=10.0)})
    priced = await site.visitor(prices=prices)
    page = (await priced.get("/usage")).text
    for text in ("Cost EUR", cost((3500 * 2 + 500 * 0.5 + 1234 * 10) / 1e6)):
        assert text in page
    assert "--prices FILE" not in page
    unpriced = await site.visitor(prices=Prices(models={"other": Price(input=1.0)}))
    assert "no price" in (await unpriced.get("/usage")).text
    assert "Nothing was used" in (await visitor.get("/usage?from=2020-01-01&to=2020-01-02")).text
    assert (await visitor.get("/usage?by=nothing")).status_code == 400
    assert "from must be a day" in (await visitor.get("/usage?from=x")).text


async def test_a_budget_is_set_changed_and_removed(site: Site) -> None:
    store = BudgetStore(site.connection, site.keys)
    operator = await site.visitor(Access("olga", Role.OPERATOR))
    form = {"tenant": "acme", "key": "web", "per": "day", "limit": "1000"}
    answer = await operator.post("/budget/set", data=form)
    assert answer.headers["location"] == "/budget?tenant=acme&key=web&per=day"
    prices = '[models."*"]\ninput = 0.5'
    changed = form | {"limit": "20", "unit": "cost", "prices": prices}
    answer = await operator.post("/budget/set", data=changed)
    assert answer.status_code == 303, answer.text
    (budget,) = await store.read_all()
    page = (await operator.get("/budget?tenant=acme&key=web&per=day")).text
    assert '<span class="whole">20.0000 cost</span>' in page
    assert (budget.limit, budget.unit, budget.prices["*"].input, budget.key_name) == (20, "cost", 0.5, "web")
    page = (await operator.get("/budget?tenant=acme&key=web&per=day")).text
    assert "input = 0.5" in page
    change = (await operator.get("/audit.json?text=budget&since=1h")).json()["rows"][0]["change"]
    assert change == "set a budget of tenant acme: key web, limit from 1,000 tokens per day to 20 cost per day"
    assert (await operator.get("/audit.json?text=budget&until=2020-01-01")).json()["rows"] == []
    await operator.post("/budget/set", data=changed)
    change = (await operator.get("/audit.json?text=budget&since=1h")).json()["rows"][0]["change"]
    assert change == "set a budget of tenant acme: key web, limit 20 cost per day, unchanged"
    small = await operator.post("/budget/set", data=changed | {"key": "few", "limit": "0.0000421"})
    assert small.status_code == 303, small.text
    for path in ("/budget?tenant=acme&key=few&per=day", "/usage"):
        assert "0.000042" in (await operator.get(path)).text
    change = (await operator.get("/audit.json?text=budget&since=1h")).json()["rows"][0]["change"]
    assert change == "set a budget of tenant acme: key few, limit 0.0000421 cost per day"
    assert 'value="0.0000421"' in (await operator.get("/budget?tenant=acme&key=few&per=day")).text
    await store.remove_budget(next(one.name for one in await store.read_all() if one.key_name == "few"))
    for field, value in (
        ("limit", "x"),
        ("limit", "-1"),
        ("unit", "euro"),
        ("per", "year"),
        ("prices", "["),
        ("webhook", URL),
    ):
        refused = await operator.post("/budget/set", data=changed | {field: value})
        assert refused.status_code == 400
        assert field in refused.text
    await store.set_budget(msgspec.structs.replace(budget, webhook_url=URL))
    assert URL in (await operator.get("/budget?tenant=acme&key=web&per=day")).text
    viewer = await site.visitor(Access("vera", Role.VIEWER))
    assert URL not in (await viewer.get("/budget.json?tenant=acme&key=web&per=day")).text
    for path in ("/budget/set", "/budget/remove"):
        assert (await viewer.post(path, data=form | {"confirm": "acme"})).status_code == 403
    assert (await operator.post("/budget/remove", data=form)).status_code == 400, "it needs the word"
    assert (await operator.post("/budget/remove", data=form | {"confirm": "acme"})).status_code == 303
    assert await store.read_all() == []


async def test_a_budget_without_renewal_counts_on_when_its_limit_changes(site: Site) -> None:
    store = BudgetStore(site.connection, site.keys)
    await store.set_budget(Budget(tenant="acme", period=Period.ALL, limit=5.0, since=7))
    answer = await (await site.visitor()).post("/budget/set", data={"tenant": "acme", "per": "all", "limit": "9"})
    assert answer.status_code == 303
    (budget,) = await store.read_all()
    assert (budget.limit, budget.since) == (9.0, 7)
