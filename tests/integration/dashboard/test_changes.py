"""What the buttons do, and the entry that each change leaves, whoever makes it."""

from __future__ import annotations

import asyncio
import os
import pwd
import re

import msgspec
import pytest
import redis.asyncio

from penstock.ops import cli as penstock_cli
from penstock.ops.dashboard import Access, Role
from penstock.ops.views.sentences import audit_sentence
from penstock.producer import Client
from penstock.producer.control.secret_keys import OperatorKeys
from penstock.shared.deployment.audit import Audit, AuditEntry
from penstock.shared.deployment.presence import Presence, ProcessKind
from penstock.shared.messages.supervision import ScaleCommand, WorkerCommand
from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.queue.policy import TenantPolicy

from ...processes import DEADLINE_S
from .conftest import Site


async def entries(site: Site) -> list[AuditEntry]:
    return (await Audit(site.connection, site.keys).read())[::-1]


async def last_sentence(site: Site) -> str:
    return audit_sentence((await entries(site))[-1])


async def test_pausing_and_resuming(site: Site) -> None:
    visitor = await site.visitor(Access("olga", Role.OPERATOR))
    answer = await visitor.post("/queue/pause", data={"back": "model=m&q=a", "model": "m", "requeue": "1"})
    assert answer.headers["location"] == "/queue?model=m&q=a", "the page keeps its filter"
    assert "m is paused" in (await visitor.get("/queue?model=m")).text
    assert await site.queue.is_paused()
    assert "m is paused" not in (await visitor.get("/queue?model=m")).text, "a note is told once"
    await visitor.post("/queue/resume", data={"model": "m"})
    assert not await site.queue.is_paused()
    assert [(one.actor, one.via, one.action, one.target, one.result) for one in await entries(site)] == [
        ("olga", "dashboard", "queue.pause", "m", "ok"),
        ("olga", "dashboard", "queue.resume", "m", "ok"),
    ]
    # This site lets in everybody as olga.
    assert {(one.source, one.redis_user) for one in await entries(site)} == {("not asked", "default")}


async def test_destructive_actions_need_typed_confirmation(site: Site) -> None:
    await site.enqueue("waits", tenant="acme")
    visitor = await site.visitor()
    form = {"model": "m", "tenant": "acme"}
    for word in ("", "acm", "ACME"):
        refused = await visitor.post("/queue/purge", data=form | {"confirm": word})
        assert refused.status_code == 400
        assert "type &#39;acme&#39; to confirm" in refused.text
    assert (await site.queue.stats()).depth == 1
    assert (await visitor.post("/queue/purge", data=form | {"confirm": "acme"})).status_code == 303
    assert (await site.queue.stats()).depth == 0
    (entry,) = await entries(site)
    assert (entry.action, entry.details) == ("queue.purge", {"tenant": "acme", "cancelled": "1"})


async def test_a_tenant_gets_a_weight_and_loses_it(site: Site) -> None:
    await site.enqueue("waits", tenant="acme")
    visitor = await site.visitor()
    form = {"model": "m", "tenant": "acme", "weight": "2.5", "requests_per_minute": "60", "over_quota": "refuse"}
    assert (await visitor.post("/queue/tenant", data=form)).status_code == 303
    policy = TenantPolicy(weight=2.5, requests_per_minute=60, over_quota="refuse")  # type: ignore[arg-type]  # as JSON
    assert await site.queue.tenant_policy("acme") == policy
    (row,) = (await visitor.get("/queue.json?model=m")).json()["rows"]
    assert row["weight"] == 2.5
    for field, value in (("weight", "0"), ("weight", "heavy"), ("tokens_per_minute", "-1"), ("over_quota", "cry")):
        refused = await visitor.post("/queue/tenant", data=form | {field: value})
        assert refused.status_code == 400
        assert field in refused.text
    await visitor.post("/queue/tenant", data={"model": "m", "tenant": "acme", "reset": "1"})
    assert await site.queue.tenant_policy("acme") is None


async def test_a_policy_is_changed_in_part(site: Site) -> None:
    visitor = await site.visitor()
    form = {"model": "m", "strictness": "0.5", "ageing_s": "", "order": "edf", "max_queue_depth": "10"}
    assert (await visitor.post("/queue/policy", data=form)).status_code == 303
    policy = await site.queue.policy()
    assert (policy.strictness, policy.ageing_s, policy.order, policy.max_queue_depth) == (0.5, None, "edf", 10)
    assert policy.bands == ("interactive", "standard", "batch"), "a form without a field leaves it"
    more = {"bands": "fast, slow", "default_band": "slow", "events_kept": "50", "tenant.requests_per_minute": "9"}
    assert (await visitor.post("/queue/policy", data=form | more)).status_code == 303
    page = (await visitor.get("/policy?model=m")).text
    for label, value in (
        ("Ageing: seconds of waiting that raise a request by one band", "never"),
        ("Order of a tenant&#39;s requests", "earliest deadline first"),
        ("Requests per minute of a tenant without a policy of its own", "9"),
        ("Max waiting tokens", "no limit"),
        ("Bands, the most urgent first", "fast, slow"),
    ):
        assert f'<th scope="row">{label}</th><td>{value}</td>' in page
    policy = await site.queue.policy()
    assert (policy.bands, policy.events_kept, policy.tenant.requests_per_minute) == (("fast", "slow"), 50, 9)
    for field, value in (("strictness", "7"), ("bands", "A, slow"), ("events_kept", "many"), ("tenant.weight", "0")):
        refused = await visitor.post("/queue/policy", data=form | more | {field: value})
        assert refused.status_code == 400
        assert field.removeprefix("tenant.") in refused.text
    changes = [row["change"] for row in (await visitor.get("/audit.json")).json()["rows"] if row["result"] == "ok"]
    assert changes[0] == (
        "changed the policy of m: bands from interactive standard batch to fast slow, default band from standard to "
        "slow, events kept from 20000 to 50, tenant requests per minute from none to 9"
    )
    assert "olga" not in (await visitor.get("/audit")).text
    await visitor.post("/queue/policy", data=form | more)
    assert await last_sentence(site) == "changed the policy of m: policy unchanged"


async def test_a_tenant_that_waits_for_nothing_has_a_policy_before_it_comes(site: Site) -> None:
    visitor = await site.visitor()
    assert (await visitor.get("/tenant?model=m&tenant=comes")).status_code == 200
    await visitor.post("/queue/tenant", data={"model": "m", "tenant": "comes", "weight": "3"})
    (row,) = (await visitor.get("/queue.json?model=m")).json()["rows"]
    assert (row["tenant"], row["waiting"], row["weight"], row["has_own_policy"]) == ("comes", 0, 3.0, True)
    (entry,) = await entries(site)
    assert audit_sentence(entry) == "changed the policy of tenant comes for m: weight from 1 to 3"
    await visitor.post("/queue/tenant", data={"model": "m", "tenant": "comes", "weight": "3"})
    assert await last_sentence(site) == "changed the policy of tenant comes for m: policy unchanged"
    for policy in ("the queue's", "unchanged"):
        await visitor.post("/queue/tenant", data={"model": "m", "tenant": "comes", "reset": "1"})
        assert await last_sentence(site) == f"changed the policy of tenant comes for m: policy {policy}"


def test_actions_on_models_of_a_device_are_sentences() -> None:
    entry = AuditEntry(
        at=0.0, via="test", action="model.unload", actor="olga", target="chat", result="ok", details={"device": "gpu-0"}
    )
    assert audit_sentence(entry) == "put model chat on gpu-0 to sleep"


async def test_a_worker_is_ordered_to_scale_without_waiting_for_it(site: Site) -> None:
    options = {"worker": "host-1", "max_engines": "4"}
    supervisor = Presence(site.connection, site.keys, ProcessKind.SUPERVISOR, options)
    await supervisor.say()
    visitor = await site.visitor()
    async with redis.asyncio.Redis.from_url(site.url) as direct, direct.pubsub() as channel:
        await channel.subscribe(site.keys.worker_commands("host-1"))
        assert await channel.get_message(timeout=DEADLINE_S)  # that it is subscribed
        answer = await visitor.post("/workers/scale", data={"worker": "host-1", "engines": "3"})
        assert answer.status_code == 303, answer.text
        order = await channel.get_message(timeout=DEADLINE_S)
        assert await last_sentence(site) == "scaled worker host-1: engines 3", "as an older version reports none"
        for number, change in (("1", "from 1 to 3"), ("3", "3, unchanged")):
            supervisor.record.options["engines"] = number
            await supervisor.say()
            await visitor.post("/workers/scale", data={"worker": "host-1", "engines": "3"})
            assert await last_sentence(site) == f"scaled worker host-1: engines {change}"
    assert order is not None
    assert msgspec.msgpack.decode(order["data"], type=WorkerCommand) == ScaleCommand(3)
    for engines, problem in (("9", "at most 4"), ("0", "at least 1"), ("x", "engines must be a number")):
        refused = await visitor.post("/workers/scale", data={"worker": "host-1", "engines": engines})
        assert refused.status_code == 400
        assert problem in refused.text
    assert [one.result for one in await entries(site)] == ["ok"] * 3 + ["validation_error"] * 2


async def test_the_dead_letter_is_grouped_and_replayed(site: Site) -> None:
    for number in range(3):
        await site.park(f"same-{number}", "the same input")
    await site.park("other", "another input")
    visitor = await site.visitor()
    page = (await visitor.get("/dead")).text
    assert page.count('<section class="group">') == 2
    rows = (await visitor.get("/dead.json")).json()["rows"]
    input_hash = next(row["input_hash"] for row in rows if row["request"] == "same-0")
    assert (await visitor.post("/dead/replay", data={"model": "m", "id": "other"})).status_code == 303
    assert await site.broker.state("other") is RequestState.QUEUED
    await visitor.post("/dead/replay-input", data={"model": "m", "hash": input_hash})
    assert await site.broker.state("same-1") is RequestState.QUEUED
    assert (await visitor.get("/dead.json")).json()["rows"] == []
    assert (await visitor.post("/dead/replay", data={"model": "m", "id": "other"})).status_code == 404
    assert [one.action for one in await entries(site)] == ["dead.replay"] * 5


async def test_parked_requests_are_purged_by_their_word(site: Site) -> None:
    await site.park("dead-1")
    await site.park("dead-2")
    visitor = await site.visitor()
    assert (
        await visitor.post("/dead/purge", data={"model": "m", "id": "dead-1", "confirm": "dead"})
    ).status_code == 400
    assert (
        await visitor.post("/dead/purge", data={"model": "m", "id": "dead-1", "confirm": "dead-1"})
    ).status_code == 303
    (row,) = (await visitor.get("/dead.json")).json()["rows"]
    form = {"model": "m", "hash": row["input_hash"], "confirm": "m"}
    assert (await visitor.post("/dead/purge-input", data=form)).status_code == 303
    assert (await visitor.get("/dead.json")).json()["rows"] == []


async def test_a_request_is_cancelled(site: Site) -> None:
    await site.enqueue("waits")
    visitor = await site.visitor()
    assert (await visitor.post("/request/cancel", data={"model": "m", "id": "waits"})).status_code == 303
    assert await site.broker.state("waits") is RequestState.CANCELLED
    assert (await visitor.post("/request/cancel", data={"model": "m", "id": "none"})).status_code == 404
    assert [(one.target, one.result) for one in await entries(site)] == [("waits", "ok"), ("none", "request_not_found")]


async def test_failed_and_cancelled_requests_are_retried(site: Site) -> None:
    for request_id in ("cancelled", "other"):
        await site.enqueue(request_id, "the words of it", tenant="acme")
    visitor = await site.visitor()
    assert "Retry the request" not in (await visitor.get("/request?model=m&id=cancelled")).text
    await visitor.post("/request/cancel", data={"model": "m", "id": "cancelled"})
    page = (await visitor.get("/request?model=m&id=cancelled")).text
    assert "Retry the request" in page
    assert "the words of it" in page
    assert (await visitor.post("/request/retry", data={"model": "m", "id": "cancelled"})).status_code == 303
    assert await site.broker.state("cancelled") is RequestState.QUEUED
    refused = await visitor.post("/request/retry", data={"model": "m", "id": "cancelled"})
    assert refused.status_code == 404
    assert "cannot be retried" in refused.text
    for request_id in ("cancelled", "other"):
        await site.broker.cancel(request_id)
    page = (await visitor.get("/requests?model=m&state=cancelled&tenant=acme")).text
    assert "/requests/retry?model=m&amp;state=cancelled&amp;tenant=acme" in page
    preview = (await visitor.get("/requests/retry?model=m&state=cancelled&tenant=acme")).text
    assert "<b>2</b> requests of m have failed, were cancelled or have expired" in preview
    form = {"model": "m", "state": "cancelled", "tenant": "acme", "count": "2"}
    assert (await visitor.post("/requests/retry", data=form)).status_code == 400, "it needs the number"
    answer = await visitor.post("/requests/retry", data=form | {"confirm": "2"})
    assert answer.headers["location"] == "/requests?model=m&state=cancelled&tenant=acme"
    assert [await site.broker.state(one) for one in ("cancelled", "other")] == [RequestState.QUEUED] * 2
    running = {"model": "m", "state": "running", "count": "1", "confirm": "1"}
    assert (await visitor.post("/requests/retry", data=running)).status_code == 400
    assert [(one.action, one.result) for one in await entries(site)] == [
        ("request.cancel", "ok"),
        ("request.retry", "ok"),
        ("request.retry", "request_not_found"),
        ("request.retry_all", "ok"),
        ("request.retry_all", "validation_error"),
    ]


async def test_a_new_key_is_displayed_once_and_never_stored(site: Site) -> None:
    visitor = await site.visitor()
    made = await visitor.post("/operators/create", data={"name": "olga", "role": "operator", "contents": "1"})
    assert made.status_code == 200
    assert "set-cookie" not in made.headers
    key = made.text.partition("pso-")[2][:56]
    record = await OperatorKeys(site.connection, site.keys).find(f"pso-{key}")
    assert record is not None
    assert (record.name, record.role, record.sees_contents) == ("olga", Role.OPERATOR, True)
    assert key not in (await visitor.get("/operators")).text
    assert key not in (await visitor.get("/audit")).text
    form = {"id": record.key_id, "confirm": record.key_id}
    assert (await visitor.post("/operators/revoke", data=form)).status_code == 303
    assert await OperatorKeys(site.connection, site.keys).list() == []


async def test_client_and_commands_leave_entries_too(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("USER", "mallory")
    carl = pwd.getpwuid(os.getuid()).pw_name
    await site.park("dead-1")
    async with Client.connect(site.url, namespace=site.keys.namespace) as client:
        await client.pause_generation("m")
        await client.configure_tenant("acme", TenantPolicy(weight=3.0), "m")
    redis = ["--redis-url", site.url, "--namespace", site.keys.namespace]
    for command in (["queue", "resume", "m"], ["dead", "replay", "dead-1"], ["operator", "create", "olga"]):
        assert await asyncio.to_thread(penstock_cli.main, [*command, *redis]) == 0
    found = await entries(site)
    assert [(one.actor, one.via, one.action) for one in found] == [
        (carl, "client", "queue.pause"),
        (carl, "client", "queue.configure_tenant"),
        (carl, "cli", "queue.resume"),
        (carl, "cli", "dead.replay"),
        (carl, "cli", "operator_key.create"),
    ]
    capsys.readouterr()
    assert await asyncio.to_thread(penstock_cli.main, ["audit", "--action", "queue", *redis]) == 0
    printed = capsys.readouterr().out
    assert [re.split(" {2,}", line)[6] for line in printed.splitlines()[1:]] == [
        "queue.resume",
        "queue.configure_tenant",
        "queue.pause",
    ]


async def test_a_change_that_fails_is_written_down_as_such(site: Site) -> None:
    await site.enqueue("waits", tenant="acme")
    visitor = await site.visitor()
    form = {"model": "m", "tenant": "acme", "confirm": "acme", "band": "none"}
    assert (await visitor.post("/queue/purge", data=form)).status_code == 400
    (entry,) = await entries(site)
    assert (entry.action, entry.result) == ("queue.purge", "validation_error")
