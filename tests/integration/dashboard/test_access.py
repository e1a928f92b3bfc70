"""Who is let in, who may change what, and from where."""

from __future__ import annotations

import re

import httpx
import pytest

from penstock.ops.dashboard import Access, HeaderAccess, Role
from penstock.ops.dashboard.access import parse_networks, parse_roles
from penstock.ops.views.pages import ACTIONS
from penstock.producer.control.secret_keys import OperatorKeys
from penstock.shared.errors import ConfigurationError

from .conftest import HTML, Site

FORM = {"model": "m", "id": "dead-1", "tenant": "acme", "engine": "host-1-0", "of": "m", "confirm": "acme", "name": "x"}


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.path)
async def test_a_change_needs_its_role(action: object, site: Site) -> None:
    assert isinstance(action, type(ACTIONS[0]))
    await site.park("dead-1")
    await site.enqueue("waits", tenant="acme")
    below = [role for role in Role if not role.covers(action.role)]
    assert below, "nothing may be changed by a viewer"
    for role in below:
        visitor = await site.visitor(Access("eve", role))
        answer = await visitor.post(action.path, data=FORM)
        assert answer.status_code == 403
        assert action.role.value in answer.text
    assert (await site.queue.stats()).depth == 1
    assert not await site.queue.is_paused()
    assert await site.connection.execute("ZCARD", site.broker.keys.dead) == 1
    assert await site.connection.execute("EXISTS", site.keys.audit()) == 0


async def test_a_page_of_roles_is_for_admins(site: Site) -> None:
    visitor = await site.visitor(Access("eve", Role.OPERATOR))
    for path in ("/operators", "/operators.json", "/operators.csv"):
        assert (await visitor.get(path)).status_code == 403
    assert "Keys and roles" not in (await visitor.get("/")).text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "same-origin"}, 303),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 403),
        ({"origin": "http://test"}, 303),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({}, 303),  # no browser
        ({"cookie": "a=b"}, 403),  # a browser that tells nothing
    ],
)
async def test_changes_are_accepted_only_from_pages_of_the_dashboard(
    headers: dict[str, str], status: int, site: Site
) -> None:
    visitor = await site.visitor()
    visitor.headers = httpx.Headers(HTML | headers)
    assert (await visitor.post("/queue/pause", data={"model": "m"})).status_code == status
    assert await site.queue.is_paused() == (status == 303)


@pytest.mark.parametrize("path", ["/", "/none", "/static/app.css", "/overview.json"])
async def test_every_response_has_security_headers(path: str, site: Site) -> None:
    headers = (await (await site.visitor()).get(path)).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"


async def test_a_key_lets_in_until_it_is_revoked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ops.dashboard.access.CACHE_TTL_S", 0.0)
    keys = OperatorKeys(site.connection, site.keys)
    key, record = await keys.create("olga", Role.OPERATOR)
    app = await site.app(None)
    visitor = await site.visitor(app=app)
    sent = await visitor.get("/queue?model=m")
    assert sent.status_code == 303
    assert sent.headers["location"] == "/login?next=%2Fqueue%3Fmodel%3Dm"
    assert (await visitor.post("/login", data={"key": "pso-wrong", "next": "/queue"})).status_code == 401
    entered = await visitor.post("/login", data={"key": key, "next": "/queue?model=m"})
    assert (entered.status_code, entered.headers["location"]) == (303, "/queue?model=m")
    cookie = entered.headers["set-cookie"]
    assert key not in cookie
    assert {"HttpOnly", "SameSite=lax"} <= set(cookie.split("; "))
    page = await visitor.get("/queue?model=m")
    assert page.status_code == 200
    assert "olga" in page.text
    assert (await visitor.post("/queue/pause", data={"model": "m"})).status_code == 303
    # Another process of the dashboard takes the same session.
    other = await site.visitor(app=await site.app(None))
    other.cookies = visitor.cookies
    assert (await other.get("/")).status_code == 200
    assert await keys.revoke(record.key_id)
    assert (await visitor.get("/")).status_code == 303
    assert (await other.get("/")).status_code == 303


async def test_a_program_sends_its_key(site: Site) -> None:
    key, _ = await OperatorKeys(site.connection, site.keys).create("monitor")
    visitor = await site.visitor(None)
    visitor.headers = httpx.Headers({"authorization": f"Bearer {key}"})
    assert (await visitor.get("/overview.json")).status_code == 200
    assert (await visitor.post("/queue/pause", data={"model": "m"})).status_code == 403
    visitor.headers = httpx.Headers({"authorization": f"Bearer {key[:-1]}"})
    assert (await visitor.get("/overview.json")).status_code == 401


@pytest.mark.parametrize(
    "wanted", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)", "/a\r\nx: y"]
)
async def test_a_login_leads_to_pages_of_ours_alone(wanted: str, site: Site) -> None:
    key, _ = await OperatorKeys(site.connection, site.keys).create("olga")
    visitor = await site.visitor(None)
    answer = await visitor.post("/login", data={"key": key, "next": wanted})
    assert answer.headers["location"] == "/"


async def test_user_and_role_are_read_from_headers_of_a_proxy(site: Site) -> None:
    access = HeaderAccess("x-forwarded-user", roles=parse_roles(["sre=operator", "ann=admin+contents"]))
    visitor = await site.visitor(access)
    assert (await visitor.get("/")).status_code == 403
    visitor.headers["x-forwarded-user"] = "bob"
    assert "bob" in (await visitor.get("/")).text
    assert (await visitor.post("/queue/pause", data={"model": "m"})).status_code == 403
    visitor.headers["x-forwarded-groups"] = "dev, sre"
    assert (await visitor.post("/queue/pause", data={"model": "m"})).status_code == 303
    assert (await visitor.get("/operators")).status_code == 403
    visitor.headers["x-forwarded-user"] = "ann"
    assert (await visitor.get("/operators")).status_code == 200


async def test_headers_of_others_than_the_proxy_are_not_believed(site: Site) -> None:
    elsewhere = HeaderAccess("x-forwarded-user", proxies=parse_networks(["10.0.0.0/8"]))
    visitor = await site.visitor(elsewhere)  # comes from 127.0.0.1
    visitor.headers["x-forwarded-user"] = "ann"
    assert (await visitor.get("/")).status_code == 403


def test_a_wrong_role_or_network_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("got 'ann=king'")):
        parse_roles(["ann=king"])
    with pytest.raises(ConfigurationError, match=r"10\.0\.0"):
        parse_networks(["10.0.0"])


async def test_a_name_that_points_here_is_not_ours(site: Site) -> None:
    visitor = await site.visitor(hosts=("localhost", "127.0.0.1"))
    visitor.headers["host"] = "evil.example:8090"
    assert (await visitor.get("/")).status_code == 421
    visitor.headers["host"] = "localhost:8090"
    assert (await visitor.get("/")).status_code == 200
