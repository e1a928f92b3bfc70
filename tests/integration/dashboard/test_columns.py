"""Columns of tables: their labels have meanings, and a browser hides those that its user does not want."""

from __future__ import annotations

import re

import pytest

from penstock.ops.dashboard import Access, Role
from penstock.ops.dashboard.columns import COLUMNS_COOKIE, MEANINGS, tables_of
from penstock.ops.dashboard.filters import FILTERS_COOKIE
from penstock.ops.views.pages import PAGES
from penstock.shared.deployment.records import DeviceUse

from .conftest import Site

# Labels that need no explanation.
EVERYDAY = {
    "Actions", "Batch", "Change", "Clients", "Command", "Commands/s", "Created", "Device", "Done", "Endpoint",
    "Engine", "Engines", "Error", "Event", "Expires", "Failed", "From", "Host", "Key", "Kind", "Last error",
    "Last status", "Limit", "Memory", "Model", "Name", "Next attempt", "Options", "Pid", "Process",
    "Program", "Prompts and outputs", "Redis user", "Request", "Result", "Revoke", "Role", "Running", "Script",
    "Server", "Started", "State", "Status", "Tenant", "Tenants", "Time", "To", "Tokens", "Tokens/s", "Took", "Type",
    "Uptime", "User", "Version", "Waiting", "Worker",
}  # fmt: skip


def test_each_label_has_a_meaning_or_is_an_everyday_word() -> None:
    labels = {column.label for page in PAGES for table in tables_of(page.name) for column in table.columns}
    assert labels - MEANINGS.keys() - EVERYDAY == set()
    assert MEANINGS.keys() - labels <= {"Body", "Models"}


async def test_rows_have_a_cell_for_each_column(site: Site) -> None:
    await site.park("dead")
    await site.enqueue("waits", tenant="acme")
    visitor = await site.visitor()
    for path in ("/", "/queue", "/requests", "/engines", "/dead", "/system", "/audit", "/tenant?model=m&tenant=acme"):
        html = (await visitor.get(path)).text
        for table in re.findall(r"<table class.*?</table>", html, re.DOTALL):
            num = table.count('<th scope="col"')
            rows = re.findall(r"<tr.*?</tr>", table.partition("<tbody>")[2], re.DOTALL)
            assert {len(re.findall(r"<t[hd][ >]", row)) for row in rows} <= {num}, (path, table[:200])


async def test_hidden_columns_stay_hidden_in_this_browser_alone(site: Site) -> None:
    visitor = await site.visitor()
    page = (await visitor.get("/engines?model=m")).text
    fields = re.findall(r'name="(engines\.[a-z-]+)"', page)
    assert "engines.steps" in fields
    form = {name: "1" for name in fields if name != "engines.steps"}
    answer = await visitor.post("/columns", data={"page": "engines", "back": "model=m", **form})
    assert answer.headers["location"] == "/engines?model=m"
    assert visitor.cookies[COLUMNS_COOKIE] == "engines.steps"
    assert '<table class="hide-16 hide-11 hide-12">' in (await visitor.get("/engines?model=m")).text
    await visitor.post("/columns", data={"page": "overview", "models.state": "1"})
    assert "engines.steps" in visitor.cookies[COLUMNS_COOKIE], "those of other pages stay"
    assert '<table class="hide-11 hide-12">' in (await (await site.visitor()).get("/engines")).text
    assert (await visitor.post("/columns", data={"page": "none"})).status_code == 400
    visitor.cookies.set(COLUMNS_COOKIE, '"><script>')
    assert "<script>" not in (await visitor.get("/engines")).text


@pytest.mark.parametrize("role", [Role.VIEWER, Role.ADMIN])
async def test_columns_of_devices_are_there_for_engines_with_devices(site: Site, role: Role) -> None:
    use = DeviceUse(busy_share=0.5, used_bytes=2**30, total_bytes=2**31, power_w=50.0, temperature_c=40)
    for fields, labels in (
        ({}, set()),
        ({"device_memory_bytes": 2**30}, {"Device memory"}),
        ({"device_memory_bytes": 2**30, "device_use": use}, {"Device memory", "GPU"}),
    ):
        await site.register(**fields)
        html = (await (await site.visitor(Access("v", role))).get("/engines")).text
        table = re.search(r'<table class="([^"]*)">.*?</thead>', html, re.DOTALL)
        assert table is not None
        columns = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', table[0])
        hidden = {columns[int(number) - 1] for number in re.findall(r"hide-(\d+)", table[1])}
        assert hidden == {"Device memory", "GPU"} - labels


async def test_a_filter_is_saved_under_a_name_and_removed(site: Site) -> None:
    visitor = await site.visitor()
    form = {"page": "requests", "back": "model=m&state=failed&since=1h&x=y", "name": "<bad> hour"}
    answer = await visitor.post("/filters", data=form)
    assert answer.headers["location"] == "/requests?model=m&state=failed&since=1h"
    link = '<a href="/requests?model=m&amp;state=failed&amp;since=1h"'
    page = (await visitor.get("/requests")).text
    assert f"{link}>&lt;bad&gt; hour</a>" in page
    assert f'{link} aria-current="true">' in (await visitor.get(answer.headers["location"])).text
    assert link not in (await visitor.get("/audit")).text
    await visitor.post("/filters", data=form | {"back": "model=m", "remove": "1"})
    assert "hour" not in (await visitor.get("/requests")).text
    for name, problem in (("", "name must have"), ("x" * 61, "name must have")):
        refused = await visitor.post("/filters", data=form | {"name": name})
        assert (refused.status_code, problem in refused.text) == (400, True)
    for number in range(99):
        refused = await visitor.post("/filters", data=form | {"name": f"filter {number}"})
    assert "can store no more filters" in refused.text
    visitor.cookies.set(FILTERS_COOKIE, '"><script>')
    assert "<script>" not in (await visitor.get("/requests")).text
