"""The page of usage and budgets, against requests that were served."""

from __future__ import annotations

from penstock.ops.views.words import number, percent
from penstock.shared.broker import EngineCapacity, FinalRecord
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.partitions.budgets import BudgetStore
from penstock.shared.queue.budgets import Budget

from .conftest import Site


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
    assert "Nothing was used" in (await visitor.get("/usage?from=2020-01-01&to=2020-01-02")).text
    assert (await visitor.get("/usage?by=nothing")).status_code == 400
    assert "from must be a day" in (await visitor.get("/usage?from=x")).text
