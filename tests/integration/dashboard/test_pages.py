"""What the pages say, without a browser: HTML that needs no script, CSV and JSON of the same."""

from __future__ import annotations

import asyncio
import csv
import io
import re
from contextlib import aclosing
from urllib.parse import parse_qsl

import msgspec
import pytest

from penstock.ops.dashboard import Access, Role, everybody
from penstock.ops.dashboard.runtime import Topic
from penstock.ops.views.page import RUNBOOK
from penstock.ops.views.pages import PAGES
from penstock.producer import Client, SamplingParams
from penstock.producer.webhooks.events import WebhookAttempt, WebhookEvent
from penstock.shared.broker import Broker, EngineCapacity, Queue
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.supervision import EngineState
from penstock.shared.partitions import change_partitions

from ...processes import DEADLINE_S
from .conftest import ADMIN, CAUSE, Site

EVIL = "<script>alert(1)</script>\x07\u202egnp.exe"


async def fill(site: Site) -> None:
    """Something for each page to show."""
    await site.park("dead-1", EVIL)
    await site.enqueue("runs", EVIL, tenant="acme")
    await site.claim()
    for number in range(3):
        await site.enqueue(f"waits-{number}", tenant="acme")


QUERIES = {
    "tenant": "?model=m&tenant=acme",
    "budget": "?tenant=acme",
    "policy": "?model=m",
    "parked": "?model=m&id=dead-1",
    "request": "?model=m&id=runs",
    "webhook": "?id=event-1",
    "cancel": "?model=m&tenant=acme",
    "retry": "?model=m&tenant=acme&state=ended",
}


async def make_event(site: Site) -> None:
    events = (await site.app(lambda _: None)).state.runtime.source.events
    event = WebhookEvent(
        event_id="event-1",
        type="request.completed",
        url="https://hooks.example.org/x?token=secret",
        tenant="acme",
        created_at=1.0,
        body="the body of it",
        attempts=[WebhookAttempt(at=2.0, status=500, error="status 500")],
    )
    await events.create(event)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
async def test_every_page_has_a_title_its_table_as_csv_and_json_and_no_inline_code(page: object, site: Site) -> None:
    assert isinstance(page, type(PAGES[0]))
    await fill(site)
    await make_event(site)
    app = await site.app(everybody(ADMIN))
    visitor = await site.visitor(app=app)
    query = QUERIES.get(page.name, "")
    answer = await visitor.get(page.path + query)
    assert answer.status_code == 200, answer.text
    assert "<title>" in answer.text
    assert "· Penstock</title>" in answer.text
    assert answer.text.count("<script") == answer.text.count('<script src="/static/') == 3
    assert " style=" not in answer.text
    assert " onclick" not in answer.text
    stem = page.path if page.path != "/" else "/overview"
    told = (await visitor.get(f"{stem}.json{query}")).json()
    rows = list(csv.DictReader(io.StringIO((await visitor.get(f"{stem}.csv{query}")).text)))
    assert len(rows) == len(told["rows"])
    assert [list(row) for row in rows] == [list(row) for row in told["rows"]]
    if page.live:
        topic = Topic(page, tuple(sorted(parse_qsl(query[1:]))), Role.ADMIN, True, "")
        async with aclosing(app.state.runtime.watcher.follow(topic)) as events, asyncio.timeout(DEADLINE_S):
            assert b"cannot be shown" not in await anext(events)


async def test_pages_agree_with_the_state_of_the_queue(site: Site) -> None:
    await fill(site)
    visitor = await site.visitor()
    stats = await visitor.get("/queue.json?model=m")
    facts = stats.json()["facts"]
    assert (facts["depth"], facts["num_running"]) == (3, 1)
    (row,) = (await visitor.get("/overview.json")).json()["rows"]
    assert (row["waiting"], row["running"], row["parked"], row["engines"]) == (3, 1, 1, 1)
    shown = {one["request"]: one["state"] for one in (await visitor.get("/requests.json?model=m")).json()["rows"]}
    assert shown == {"runs": "claimed", "waits-0": "queued", "waits-1": "queued", "waits-2": "queued"}


async def test_parameters_of_a_waiting_request_are_displayed(site: Site) -> None:
    await site.enqueue("waits", "the words of it", tenant="acme")
    text = (await (await site.visitor()).get("/request?model=m&id=waits")).text
    assert "the words of it" in text
    assert "temperature" in text
    assert "the words of it" not in (await (await site.visitor(Access("x"))).get("/request?model=m&id=waits")).text


@pytest.mark.parametrize("path", ["/request?model=m&id=runs", "/parked?model=m&id=dead-1"])
async def test_contents_are_escaped_and_unseen_characters_are_written_out(path: str, site: Site) -> None:
    await fill(site)
    (claim,) = [one for one in await site.broker.claims("host-1-0") if one[0] == "runs"]
    await site.append("runs", claim[1], Delta(index=0, token_ids=[1], text=EVIL))
    text = (await (await site.visitor()).get(path)).text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert r"\u202egnp.exe" in text
    assert "<script>alert" not in text
    assert not {"\x07", "\u202e"} & set(text)


async def test_contents_need_the_contents_right(site: Site) -> None:
    await fill(site)
    await make_event(site)
    (claim,) = [one for one in await site.broker.claims("host-1-0") if one[0] == "runs"]
    await site.append("runs", claim[1], Delta(index=0, token_ids=[1], text="a secret answer"))
    admin = await site.visitor(Access("no", Role.ADMIN))
    for path in ("/request{}?model=m&id=runs", "/parked{}?model=m&id=dead-1", "/webhook{}?id=event-1"):
        for form in ("", ".json", ".csv"):
            text = (await admin.get(path.format(form))).text
            assert "secret" not in text
            assert "alert(1)" not in text
            assert "the body of it" not in text
    assert "a secret answer" in (await (await site.visitor()).get("/request?model=m&id=runs")).text


async def test_problems_are_listed_first(site: Site) -> None:
    await site.register(state=EngineState.FAILED, error="no memory")
    await site.enqueue("waits")
    await site.queue.pause(put_back=False)
    visitor = await site.visitor()
    told = (await visitor.get("/overview.json")).json()["facts"]["problems"]
    assert "engine host-1-0 is failed: no memory" in told
    assert "1 request of m wait, and no engine serves it" in told
    assert "the queue of m is paused; 1 wait" in told
    assert any("append-only" in problem for problem in told)  # the tests' Redis keeps nothing
    page, runbook = (await visitor.get("/")).text, (await visitor.get("/runbook")).text
    links = set(re.findall(r'href="/runbook#([^"]+)"', page))
    assert links == {"PenstockEngineDead", "PenstockNoEngine", "PenstockPausedForLong", "PenstockRedisNotPersistent"}
    assert [title for title in RUNBOOK.values() if f'<h2 id="{title.replace(" ", "-")}">' not in runbook] == []


async def test_a_never_served_model_is_listed_with_its_waiting_requests(site: Site) -> None:
    async with Client.connect(site.url, namespace=site.keys.namespace, wait_for_model=True) as client:
        await client.submit("hi", SamplingParams(max_tokens=3), model="my-modle")
        await site.register("my-model")
    visitor = await site.visitor()
    overview = (await visitor.get("/")).text
    assert "no worker has ever served model my-modle, and 1 request waits for it" in overview
    assert "did you mean my-model?" in overview
    for path in ("/queue", "/requests", "/engines", "/dead"):
        assert (await visitor.get(f"{path}?model=my-modle")).status_code == 200


async def test_an_unknown_request_or_model_is_a_sentence(site: Site) -> None:
    visitor = await site.visitor()
    for path in ("/request?model=m&id=none", "/queue?model=none", "/webhook?id=none", "/parked?model=m&id=none"):
        answer = await visitor.get(path)
        assert answer.status_code == 404, path
        assert "none" in answer.text
        assert "<h1>Not found</h1>" in answer.text
        assert '<nav aria-label="Pages">' in answer.text
        assert "Traceback" not in answer.text
    assert (await visitor.get("/request?model=m")).status_code == 400


async def test_many_tenants_are_paged_and_searchable_by_name(site: Site) -> None:
    for number in range(120):
        await site.enqueue(f"r{number}", tenant=f"tenant-{number:03}")
    visitor = await site.visitor()
    first = (await visitor.get("/queue.json?model=m")).json()["rows"]
    rest = (await visitor.get("/queue.json?model=m&from=100")).json()["rows"]
    assert (len(first), len(rest)) == (100, 20)
    assert len({row["tenant"] for row in first + rest}) == 120
    (found,) = (await visitor.get("/queue.json?model=m&q=t-077")).json()["rows"]
    assert found["tenant"] == "tenant-077"


async def test_a_cell_of_csv_is_no_formula(site: Site) -> None:
    await site.enqueue("r", tenant="=cmd()")
    rows = list(csv.DictReader(io.StringIO((await (await site.visitor()).get("/queue.csv?model=m")).text)))
    assert rows[0]["tenant"] == "'=cmd()"


async def test_a_log_is_read_without_listening_to_its_channel(site: Site) -> None:
    await fill(site)
    visitor = await site.visitor()
    await visitor.get("/request?model=m&id=runs")
    assert await site.connection.execute("PUBSUB", "NUMSUB", site.broker.keys.output("runs")) == [
        site.broker.keys.output("runs").encode(),
        0,
    ]


async def test_a_replayed_request_is_displayed_from_its_new_start(site: Site) -> None:
    await site.enqueue("again")
    await site.claim()
    ((_, epoch),) = await site.broker.claims("host-1-0")
    await site.append("again", epoch, Delta(index=0, token_ids=[1, 2], text="first life"))
    visitor = await site.visitor()
    assert "first life" in (await visitor.get("/request?model=m&id=again")).text
    await site.broker.reclaim("host-1-0", CAUSE, is_external=False, max_deliveries=1)
    assert (await visitor.post("/dead/replay", data={"model": "m", "id": "again"})).status_code == 303
    await site.claim()
    ((_, epoch),) = await site.broker.claims("host-1-0")
    await site.append("again", epoch, Delta(index=0, token_ids=[3], text="second "))
    await site.append("again", epoch, Delta(index=1, token_ids=[4, 5], text="life"))
    text = (await visitor.get("/request?model=m&id=again")).text
    assert "second life" in text
    assert "first life" not in text


async def test_a_log_is_read_on_and_from_its_start_where_it_lost_its_end(site: Site) -> None:
    await site.enqueue("grows")
    await site.claim()
    ((_, epoch),) = await site.broker.claims("host-1-0")
    visitor = await site.visitor()
    shown = ""
    for number in range(3):
        await site.append("grows", epoch, Delta(index=number, token_ids=[number], text=f"piece-{number} "))
        shown += f"piece-{number} "
        assert (await visitor.get("/request.json?model=m&id=grows")).json()["facts"]["text"] == shown
    # As a Redis that comes back without its last second; what follows is cut into other records.
    log = site.broker.keys.log("grows")
    await site.connection.execute("LTRIM", log, 0, 0)
    for index, tokens, text in ((1, [1, 2], "piece-1 piece-2 "), (3, [3], "piece-3 ")):
        record = msgspec.msgpack.encode(Delta(index=index, token_ids=tokens, text=text))
        await site.connection.execute("RPUSH", log, record)
    assert (await visitor.get("/request.json?model=m&id=grows")).json()["facts"]["text"] == shown + "piece-3 "


async def test_a_model_of_several_partitions_is_one(site: Site) -> None:
    await change_partitions(site.connection, site.keys, "m", 3)
    async with Client.connect(site.url, namespace=site.keys.namespace) as client:
        for number in range(12):
            await client.submit("hello", tenant=f"tenant-{number}", request_id=f"waits-{number}")
    brokers = [Broker(site.connection, site.keys.model("m", number), number) for number in range(3)]
    depths = [(await Queue(site.connection, broker.keys).stats()).depth for broker in brokers]
    last = max(number for number, depth in enumerate(depths) if depth)
    assert last, "they are in several"
    (claim,) = (await brokers[last].claim("host-1-0", EngineCapacity(max_num_seqs=1))).claims
    visitor = await site.visitor()
    facts = (await visitor.get("/queue.json?model=m")).json()["facts"]
    assert (facts["depth"], facts["num_running"]) == (11, 1)
    shown = {one["request"]: one["state"] for one in (await visitor.get("/requests.json?model=m")).json()["rows"]}
    assert shown.pop(claim.request_id) == "claimed"
    assert [*shown.values()] == ["queued"] * 11
    for request_id in shown:
        assert (await visitor.get(f"/request?model=m&id={request_id}")).status_code == 200
        assert (await visitor.post("/request/cancel", data={"model": "m", "id": request_id})).status_code == 303
    assert (await visitor.get("/queue.json?model=m")).json()["facts"]["depth"] == 0
    await visitor.post("/queue/pause", data={"model": "m"})
    assert [await Queue(site.connection, broker.keys).is_paused() for broker in brokers] == [True] * 3
    await brokers[last].reclaim("host-1-0", CAUSE, is_external=False, max_deliveries=1)
    (parked,) = (await visitor.get("/dead.json?model=m")).json()["rows"]
    assert parked["request"] == claim.request_id
    assert (await visitor.get("/overview.json")).json()["rows"][0]["parked"] == 1


async def test_the_page_of_engines_lists_their_configuration(site: Site) -> None:
    visitor = await site.visitor()
    page = (await visitor.get("/engines")).text
    for words in ("7 requests", "Some Processor", "amx_bf16"):
        assert words in page
    (row,) = (await visitor.get("/engines.json")).json()["rows"]
    assert row["setup"]["processor"] == "Some Processor"
