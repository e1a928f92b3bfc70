"""What requests have lived through, and lists of them: as a page, as a list for who hears it, as JSON."""

from __future__ import annotations

import re

import pytest

from penstock.ops.dashboard import Access, Role
from penstock.shared.broker import EngineCapacity, FinalRecord
from penstock.shared.deployment.audit import Audit
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.queue.lifecycle import RequestState

from .conftest import CAUSE, Site


async def run_on(site: Site, request_id: str, engine: str, index: int) -> None:
    """Let an engine claim a request and say one token."""
    (claim,) = (await site.broker.claim(engine, EngineCapacity(max_num_seqs=1))).claims
    assert claim.request_id == request_id
    await site.append(request_id, claim.epoch, Delta(index=index, token_ids=[index], text=f"word-{index} "))


async def die_twice(site: Site, request_id: str) -> None:
    """A request of which two engines have said a token and died, and which a third one runs."""
    await site.enqueue(request_id, "the prompt of it", tenant="acme")
    for number in range(3):
        await run_on(site, request_id, f"host-{number}-0", number)
        if number < 2:
            await site.broker.reclaim(f"host-{number}-0", CAUSE, is_external=True, max_deliveries=3)


def bars(html: str) -> list[tuple[float, float]]:
    found = re.findall(r'<rect class="[a-z-]+" x="([\d.]+)" .*?width="([\d.]+)"', html)
    return [(float(x), float(width)) for x, width in found]


def items(html: str) -> list[str]:
    """Return what a screen reader says of the timeline."""
    (timeline,) = re.findall(r'<ol class="timeline">(.*?)</ol>', html, re.DOTALL)
    found = re.findall(r"<li>(.*?)</li>", timeline, re.DOTALL)
    return [" ".join(re.sub(r"<[^>]+>", "", one).split()) for one in found]


async def test_a_request_with_two_engine_deaths_lists_each_engine_and_resume_position(site: Site) -> None:
    await die_twice(site, "moved")
    visitor = await site.visitor()
    html = (await visitor.get("/request?model=m&id=moved")).text
    told = items(html)
    taken_back = f"then requeued after the death of its engine: {CAUSE.reason}"
    assert [re.sub(r"[\d.]+ (ms|s)\b", "T", one) for one in told] == [
        "Waits for T; then claimed.",
        f"Runs on host-0-0 for T, 1 token; {taken_back}.",
        "Waits for T; then claimed.",
        f"Runs on host-1-0 for T, resumed after token 1, 1 token; {taken_back}.",
        "Waits for T; then claimed.",
        "Runs on host-2-0 for T so far, resumed after token 2.",
    ]
    assert "Resumed 2 times on another engine." in html
    drawn = bars(html)
    assert len(drawn) == 6
    assert all(x >= 0 and x + width <= 100.01 and width > 0 for x, width in drawn)
    assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
    assert drawn[-1][0] + drawn[-1][1] == pytest.approx(100, abs=0.1), "what is under way reaches until now"
    rows = (await visitor.get("/request.json?model=m&id=moved")).json()["rows"]
    assert [(row["what"], row["engine"], row["first_token"], row["tokens"]) for row in rows if row["engine"]] == [
        ("runs", "host-0-0", 0, 1),
        ("runs", "host-1-0", 1, 1),
        ("runs", "host-2-0", 2, 0),
    ]
    epochs = [row["epoch"] for row in rows if row["engine"]]
    assert len(set(epochs)) == 3


async def test_an_expired_request_keeps_its_timeline_without_contents(site: Site) -> None:
    await die_twice(site, "gone")
    assert await site.broker.cancel("gone") is RequestState.CANCELLED
    visitor = await site.visitor()
    before = items((await visitor.get("/request?model=m&id=gone")).text)
    for key in (site.broker.keys.request("gone"), site.broker.keys.log("gone"), site.broker.keys.payload("gone")):
        await site.connection.execute("DEL", key)
    answer = await visitor.get("/request?model=m&id=gone")
    assert answer.status_code == 200
    assert items(answer.text) == before
    assert before[-1].startswith("Cancelled at ")
    assert "The result has expired" in answer.text
    assert "the prompt of it" not in answer.text
    assert "word-" not in answer.text
    facts = (await visitor.get("/request.json?model=m&id=gone")).json()["facts"]
    assert (facts["state"], facts["tenant"], facts["num_attempts"]) == ("cancelled", "acme", 3)
    assert (await visitor.get("/request?model=m&id=never")).status_code == 404


async def shown(site: Site, query: str) -> set[str]:
    rows = (await (await site.visitor()).get(f"/requests.json?model=m{query}")).json()["rows"]
    return {row["request"] for row in rows}


async def fill(site: Site) -> None:
    """Add a running, a finished, a cancelled and two waiting requests."""
    await site.enqueue("a-ends", tenant="acme")
    (claim,) = (await site.broker.claim("host-1-0", EngineCapacity(max_num_seqs=1))).claims
    end = Delta(index=0, token_ids=[1], finish_reason=FinishReason.STOP)
    assert await site.broker.finish([FinalRecord("a-ends", claim.epoch, end)]) == []
    await site.enqueue("a-runs", tenant="acme", band="batch")
    await site.broker.claim("host-1-0", EngineCapacity(max_num_seqs=1))
    await site.enqueue("b-cancelled", tenant="bolt")
    await site.broker.cancel("b-cancelled")
    await site.enqueue("b-waits", tenant="bolt")
    await site.enqueue("c-waits", tenant="acme", band="batch")


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", {"a-runs", "b-waits", "c-waits"}),
        ("&state=running", {"a-runs"}),
        ("&state=waiting", {"b-waits", "c-waits"}),
        ("&state=cancelled", {"b-cancelled"}),
        ("&state=finished", {"a-ends"}),
        ("&tenant=bolt", {"b-waits"}),
        ("&state=ended&tenant=bolt", {"b-cancelled"}),
        ("&band=batch", {"a-runs", "c-waits"}),
        ("&engine=host-1-0", {"a-runs"}),
        ("&prefix=c-", {"c-waits"}),
        ("&state=ended&since=1h", {"a-ends", "b-cancelled"}),
    ],
)
async def test_a_list_contains_the_requests_that_match_its_filter(query: str, wanted: set[str], site: Site) -> None:
    await fill(site)
    assert await shown(site, query) == wanted


async def test_a_list_names_its_filter(site: Site) -> None:
    html = (await (await site.visitor()).get("/requests?model=m&state=ended&tenant=<b>ACME</b>")).text
    assert "Shown: ended, tenant &lt;b&gt;ACME&lt;/b&gt;." in html
    assert "No requests match." in html


async def test_a_list_leads_to_requests_that_have_expired(site: Site) -> None:
    await fill(site)
    await site.connection.execute("DEL", site.broker.keys.request("b-cancelled"))
    visitor = await site.visitor()
    html = (await visitor.get("/requests?model=m&state=ended")).text
    assert 'href="/request?model=m&amp;id=b-cancelled"' in html
    assert (await visitor.get("/request?model=m&id=b-cancelled")).status_code == 200


@pytest.mark.parametrize(("query", "name"), [("state=dancing", "states"), ("since=yesterday", "since")])
async def test_a_wrong_filter_is_a_sentence(query: str, name: str, site: Site) -> None:
    for path in ("/requests", "/requests.csv", "/requests/cancel"):
        answer = await (await site.visitor()).get(f"{path}?model=m&{query}")
        assert answer.status_code == 400
        assert f"{name} must be" in answer.text


async def test_cancelling_many_previews_their_number_and_needs_it_as_confirmation(site: Site) -> None:
    await fill(site)
    operator = await site.visitor(Access("olga", Role.OPERATOR))
    page = (await operator.get("/requests?model=m&tenant=acme")).text
    assert "Cancel these requests" in page
    assert "Running 1</a>" in page
    assert "Waiting 2</a>" in page
    preview = await operator.get("/requests/cancel?model=m&tenant=acme")
    assert "<b>2</b> requests of m would be cancelled now" in preview.text
    assert "a-runs" in preview.text
    form = {"model": "m", "tenant": "acme", "count": "2"}
    assert (await operator.post("/requests/cancel", data=form)).status_code == 400
    assert await site.broker.state("c-waits") is RequestState.QUEUED
    done = await operator.post("/requests/cancel", data=form | {"confirm": "2"})
    assert done.headers["location"] == "/requests?model=m&tenant=acme"
    assert "cancelled 2 requests: running or waiting, tenant acme" in (await operator.get("/requests?model=m")).text
    assert "a-runs" not in (await operator.get("/requests?model=m&tenant=acme")).text
    states = [await site.broker.state(one) for one in ("a-runs", "c-waits", "b-waits")]
    assert states == [RequestState.CANCELLED, RequestState.CANCELLED, RequestState.QUEUED]
    (entry,) = await Audit(site.connection, site.keys).read()
    assert (entry.actor, entry.action, entry.target, entry.details["cancelled"]) == (
        "olga",
        "request.cancel_all",
        "m",
        "2",
    )


async def test_all_at_once_or_by_a_viewer_is_refused(site: Site) -> None:
    await fill(site)
    refused = await (await site.visitor()).post("/requests/cancel", data={"model": "m", "count": "3", "confirm": "3"})
    assert refused.status_code == 400
    assert "the filter is empty" in refused.text
    viewer = await site.visitor(Access("vera", Role.VIEWER))
    assert (await viewer.get("/requests/cancel?model=m&tenant=acme")).status_code == 403
    form = {"model": "m", "tenant": "acme", "count": "2", "confirm": "2"}
    assert (await viewer.post("/requests/cancel", data=form)).status_code == 403
    assert "Cancel these requests" not in (await viewer.get("/requests?model=m&tenant=acme")).text
    assert (await site.queue.stats()).depth == 2
