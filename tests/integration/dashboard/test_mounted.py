"""The same pages inside an app of somebody else, under a path of its own."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from penstock.ops.dashboard import Access, Role, dashboard
from penstock.ops.views.pages import PAGES
from penstock.producer.control.secret_keys import OperatorKeys

from .conftest import HTML, Site


def who(connection: HTTPConnection) -> Access | None:
    """The app's own users, by whatever it knows of them."""
    user = connection.headers.get("x-user")
    return Access(user, Role.OPERATOR) if user else None


@pytest.mark.parametrize(("module", "name"), [("starlette.applications", "Starlette"), ("fastapi", "FastAPI")])
async def test_all_addresses_are_below_the_mount_path(module: str, name: str, site: Site) -> None:
    kind: type[Starlette] = getattr(pytest.importorskip(module), name)
    pages = dashboard(site.url, access=who, namespace=site.keys.namespace)

    @asynccontextmanager
    async def lifespan(_: object):
        async with pages.router.lifespan_context(pages):
            yield

    app = kind(lifespan=lifespan)
    app.mount("/ops/penstock", pages)
    transport = httpx.ASGITransport(app)
    headers = {**HTML, "x-user": "ann", "sec-fetch-site": "same-origin"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as visitor,
    ):
        page = await visitor.get("/ops/penstock/")
        assert page.status_code == 200
        addresses = re.findall(r'(?:href|src|action|hx-sse:connect)="([^"]*)"', page.text)
        assert len(addresses) > len([page for page in PAGES if page.nav])
        assert [one for one in addresses if not one.startswith(("/ops/penstock/", "#main"))] == []
        assert (await visitor.get("/ops/penstock/static/app.css")).status_code == 200
        done = await visitor.post("/ops/penstock/queue/pause", data={"model": "m"})
        assert done.headers["location"] == "/ops/penstock/queue?model=m"
        assert "Path=/ops/penstock" in done.headers["set-cookie"]
        assert "m is paused" in (await visitor.get(done.headers["location"])).text
        assert (await visitor.get("/ops/penstock/", headers={"x-user": ""})).status_code == 403


async def test_a_login_stays_below_the_path(site: Site) -> None:
    key, _ = await OperatorKeys(site.connection, site.keys).create("olga")
    pages = dashboard(site.url, namespace=site.keys.namespace)
    app = Starlette()
    app.mount("/penstock", pages)
    transport = httpx.ASGITransport(app)
    headers = {**HTML, "sec-fetch-site": "same-origin"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as visitor:
        # Nobody has told the pages of the start: the first request connects.
        sent = await visitor.get("/penstock/engines")
        assert sent.headers["location"] == "/penstock/login?next=%2Fengines"
        entered = await visitor.post("/penstock/login", data={"key": key, "next": "/engines"})
        assert entered.headers["location"] == "/penstock/engines"
        assert (await visitor.get("/penstock/engines")).status_code == 200
    await pages.state.runtime.close()
