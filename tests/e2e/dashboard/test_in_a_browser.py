"""The dashboard as people use it: a real Chromium, a real worker, and nothing else between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.server import LocalServer
from penstock.ops.local.stack import LocalStack
from penstock.ops.views.pages import PAGES
from penstock.producer.control.secret_keys import Role
from penstock.shared.broker import DeadLetter, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.audit import Audit
from penstock.shared.deployment.records import EngineHeartbeat, ModelCard
from penstock.shared.messages.supervision import EngineState
from penstock.shared.partitions.budgets import BudgetStore

from ...browser import needs_chromium, violations
from ...gate import Gate
from .conftest import CHARTED, LEAVING, UNSERVED, Operators, Visit

pytestmark = [pytest.mark.xdist_group("deployment"), needs_chromium]
playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")

QUERIES = {
    "tenant": "?model=demo&tenant=acme",
    "budget": "?tenant=acme",
    "policy": "?model=demo",
    "queue": "?model=demo",
    "cancel": "?model=demo&tenant=acme",
    "retry": "?model=demo&tenant=acme&state=ended",
}
# Of one thing that has to be there; their tests open them.
NEED_A_THING = ("request", "parked", "webhook")
SIMPLE = [page for page in PAGES if page.name not in NEED_A_THING]


# Replaces the content of the page by the contents of all pages, each in a section with its path.
JOIN = """async (paths) => {
  const sections = await Promise.all(paths.map(async (path) => {
    const page = new DOMParser().parseFromString(await (await fetch(path)).text(), "text/html");
    page.querySelectorAll("dialog").forEach((dialog) => dialog.remove());
    page.querySelectorAll("main [id]").forEach((element) => { element.id += path; });
    const section = document.createElement("section");
    section.setAttribute("aria-label", path);
    section.append(...page.querySelector("main").childNodes);
    return section;
  }));
  document.querySelector("main").replaceChildren(...sections);
}"""
TOO_WIDE = """[...document.querySelectorAll("main > section")].filter((one) => one.scrollWidth > one.clientWidth)
  .map((one) => one.getAttribute("aria-label"))"""
# Columns that their window cuts, with the label of their table.
CUT = """[...document.querySelectorAll(".scroll")].flatMap((one) => [...one.querySelectorAll("thead th")]
  .filter((column) => column.getBoundingClientRect().right > one.getBoundingClientRect().right + 1)
  .map((column) => [one.getAttribute("aria-label"), column.textContent]))"""


def test_every_page_loads_fits_its_window_and_axe_finds_nothing_serious(visit: Visit, operators: Operators) -> None:
    operators.park("for-axe")
    operators.submit("of-acme", tenant="acme")
    paths = [page.path + QUERIES.get(page.name, "") for page in SIMPLE]
    paths += ["/request?model=demo&id=of-acme", "/parked?model=poisoned&id=for-axe"]
    for path in paths:
        visit.open(path)
        assert "Penstock" in visit.page.title()
    # Their contents in one document, since axe costs more for many small documents than for a large one.
    visit.page.evaluate(JOIN, paths)
    for width in (390, 1280):
        visit.page.set_viewport_size({"width": width, "height": 800})
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width, visit.page.evaluate(TOO_WIDE)
    # Further columns may need a scroll.
    cut = {tuple(column) for column in visit.page.evaluate(CUT)}
    assert not cut & {("Requests", "Band"), ("Engines", "Model")}
    problems = violations(visit.page)
    assert problems == [], json.dumps(problems, indent=1)


def test_figures_move_while_requests_run(visit: Visit, operators: Operators, gate: Gate) -> None:
    visit.open("/queue?model=demo")
    visit.wait_until_live()
    visit.expect("[data-figure=running]", "0")
    gate.hold_at(5)
    operators.submit("moves")
    visit.expect("[data-figure=running]", "1")
    visit.open("/request?model=demo&id=moves")
    visit.expect("[data-figure=tokens]", "5")
    output = visit.page.locator("#output").inner_text()
    visit.page.evaluate("window.isTheSamePage = true")
    gate.open()
    visit.expect("[data-figure=state]", "finished")
    visit.expect("[data-figure=tokens]", "40")
    whole = visit.page.locator("#output").inner_text()
    assert len(whole) > len(output)
    assert whole.startswith(output)
    timeline = visit.page.locator(".timeline li")
    playwright.expect(timeline).to_have_count(3)
    playwright.expect(timeline.last).to_contain_text("Finished")
    assert visit.page.evaluate("window.isTheSamePage"), "it came without loading the page again"


def test_pausing_holds_requests_and_resuming_lets_them_go(visit: Visit, operators: Operators) -> None:
    visit.open("/queue?model=demo")
    visit.page.get_by_role("button", name="Pause", exact=True).click()
    visit.page.get_by_text("demo is paused").wait_for()
    operators.submit("held")
    visit.expect("[data-figure=waiting]", "1")
    visit.page.get_by_role("button", name="Resume").click()
    visit.page.get_by_text("demo is resumed").wait_for()
    visit.expect("[data-figure=waiting]", "0")
    visit.open("/request?model=demo&id=held")
    visit.expect("[data-figure=state]", "finished")


def test_a_parked_request_is_shown_replayed_and_purged(visit: Visit, operators: Operators) -> None:
    for request_id in ("to-replay", "to-purge"):
        operators.park(request_id)
    visit.open("/dead?model=poisoned")
    visit.page.get_by_role("link", name="to-replay").click()
    visit.page.get_by_text("Traceback: <b>x</b>").wait_for()
    visit.page.get_by_text("<img src=x onerror=alert(1)>\\u202e").wait_for()
    visit.page.get_by_role("button", name="Retry").click()
    visit.page.get_by_text("to-replay is queued again").wait_for()
    assert operators.state("to-replay", "poisoned") == "queued"
    visit.open("/parked?model=poisoned&id=to-purge")
    confirm = visit.page.locator("form[action$='/dead/purge']")
    confirm.get_by_label("to confirm").fill("to-purge")
    confirm.get_by_role("button", name="Purge").click()
    visit.page.get_by_text("to-purge is purged").wait_for()


def test_each_change_of_a_queue_and_a_request_reaches_redis(visit: Visit, operators: Operators) -> None:
    page = visit.page
    operators.park("to-retry")
    operators.do(lambda connection: DeadLetter(connection, operators.keys.model(UNSERVED)).replay("to-retry"))
    visit.open(f"/request?model={UNSERVED}&id=to-retry")
    page.get_by_role("button", name="Cancel the request").click()
    page.get_by_text("the request is cancelled").wait_for()
    assert operators.state("to-retry", UNSERVED) == "cancelled"
    page.get_by_role("button", name="Retry the request").click()
    page.get_by_text("to-retry is queued again").wait_for()
    assert operators.state("to-retry", UNSERVED) == "queued"
    page.get_by_role("button", name="Cancel the request").click()
    page.get_by_text("the request is cancelled").wait_for()
    visit.open(f"/requests?model={UNSERVED}&state=cancelled&prefix=to-retry")
    page.get_by_role("link", name="Retry the failed, cancelled and expired ones").click()
    page.get_by_label("to confirm").fill("1")
    page.get_by_role("button", name="Retry requests").click()
    page.get_by_text("queued 1 request again").wait_for()
    assert operators.state("to-retry", UNSERVED) == "queued"
    visit.open(f"/queue?model={UNSERVED}")
    page.get_by_label("Weight and quotas of tenant").fill("comes")
    page.get_by_role("button", name="Open").click()
    page.get_by_label("Weight relative to other tenants").fill("3")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("comes has its own policy").wait_for()
    policy = operators.do(lambda connection: Queue(connection, operators.keys.model(UNSERVED)).tenant_policy("comes"))
    assert policy.weight == 3
    visit.open(f"/policy?model={UNSERVED}")
    page.get_by_label("Bands, the most urgent first").fill("interactive, standard, batch, night")
    page.get_by_role("button", name="Save").click()
    page.get_by_text(f"the queue policy of {UNSERVED} is updated").wait_for()
    policy = operators.do(lambda connection: Queue(connection, operators.keys.model(UNSERVED)).policy())
    assert policy.bands[-1] == "night"
    visit.open("/usage")
    page.get_by_label("Budget of tenant").fill("comes")
    page.get_by_role("button", name="Open").click()
    page.get_by_label("Limit per month").fill("5000")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("the budget of comes is set").wait_for()
    page.get_by_label("Limit per month").fill("7000")
    page.get_by_role("button", name="Save").click()
    playwright.expect(page.locator("[data-figure=limit]")).to_contain_text("7\u202f000 tokens per month")
    (budget,) = operators.do(lambda connection: BudgetStore(connection, operators.keys).read_all())
    assert (budget.tenant, budget.limit) == ("comes", 7000)
    page.get_by_label("to confirm").fill("comes")
    page.get_by_role("button", name="Remove").click()
    page.get_by_text("the budget of comes is removed").wait_for()
    assert operators.do(lambda connection: BudgetStore(connection, operators.keys).read_all()) == []
    visit.open("/audit")
    page.get_by_text("bands from interactive standard batch to interactive standard batch night").wait_for()


def test_columns_stay_hidden(visit: Visit) -> None:
    visit.open("/engines?model=demo")
    steps = visit.page.get_by_role("columnheader", name="Steps", exact=True)
    playwright.expect(steps).to_be_visible()
    visit.page.locator("summary", has_text="Columns").click()
    visit.page.get_by_label("Steps").uncheck()
    visit.page.get_by_role("button", name="Show these columns").click()
    playwright.expect(steps).to_be_hidden()
    visit.open("/engines")
    playwright.expect(steps).to_be_hidden()


@pytest.fixture
def two_workers(deployment: LocalStack, shared_gate: Gate, operators: Operators) -> Iterator[LocalStack]:
    """Workers of one engine each, which a test may end."""
    options = ["--device", "cpu", "--served-model-name", LEAVING, "--threads", "1"]
    with shared_gate.for_engines():
        stack = operators.aside(lambda: LocalStack(MODEL, options, num_workers=2, redis_url=deployment.url).__enter__())
    yield stack
    operators.aside(stack.stop)


def _workers(engines: list[EngineHeartbeat]) -> set[str]:
    return {engine.worker_id for engine in engines}


def _running(operators: Operators) -> str:
    """The worker that runs a request, once one does."""
    engines = operators.engines_until(lambda engines: any(one.num_running_reqs for one in engines), LEAVING)
    return next(one.worker_id for one in engines if one.num_running_reqs)


def test_workers_are_scaled_drained_and_stopped_by_clicks(
    visit: Visit, operators: Operators, two_workers: LocalStack, gate: Gate
) -> None:
    page = visit.page
    gate.hold_at(5)
    operators.submit("drained", model=LEAVING)
    first = _running(operators)
    (second,) = _workers(operators.engines_until(lambda engines: len(engines) == 2, LEAVING)) - {first}
    visit.open(f"/engines?model={LEAVING}")
    group = page.get_by_label(f"Worker {second}", exact=True)
    for number in (2, 1):
        group.get_by_label("Engines").fill(str(number))
        group.get_by_role("button", name="Scale").click()
        page.get_by_text(f"worker {second} changes to {number} engines").wait_for()
        operators.engines_until(lambda engines, number=number: len(engines) == 1 + number, LEAVING)

    page.get_by_label(f"Worker {first}", exact=True).get_by_role("button", name="Drain").click()
    page.get_by_text(f"worker {first} is draining: it claims no more requests").wait_for()
    page.get_by_text("1 request is still running").wait_for()
    operators.engines_until(lambda engines: {one.state for one in engines} > {EngineState.DRAINING}, LEAVING)
    assert operators.state("drained", LEAVING) == "claimed"
    gate.open()
    operators.engines_until(lambda engines: _workers(engines) == {second}, LEAVING)
    assert operators.state("drained", LEAVING) == "finished"

    gate.hold_at(5)
    operators.submit("stopped", model=LEAVING)
    assert _running(operators) == second
    visit.open(f"/engines?model={LEAVING}")
    group = page.get_by_label(f"Worker {second}", exact=True)
    group.get_by_label("to confirm").fill(second)
    group.get_by_role("button", name="Stop").click()
    page.get_by_text(f"worker {second} is stopping").wait_for()
    operators.engines_until(lambda engines: not engines, LEAVING)
    assert operators.state("stopped", LEAVING) == "queued"
    assert operators.aside(lambda: [worker.await_end() for worker in two_workers.workers]) == [0, 0]

    entries = operators.do(lambda connection: Audit(connection, operators.keys).read(limit=4))
    assert [(entry.action, entry.target, entry.details.get("engines")) for entry in entries[::-1]] == [
        ("worker.scale", second, "1 → 2"),
        ("worker.scale", second, "2 → 1"),
        ("worker.drain", first, None),
        ("worker.stop", second, None),
    ]


def test_an_engine_sleeps_and_wakes(visit: Visit, operators: Operators) -> None:
    visit.open("/engines?model=demo")
    visit.page.get_by_role("button", name="Sleep").click()
    visit.page.get_by_role("button", name="Wake").wait_for()
    operators.engines_until(lambda engines: {one.state for one in engines} == {EngineState.SLEEPING}, "demo")
    visit.page.get_by_role("button", name="Wake").click()
    visit.page.get_by_text("is awake").wait_for()
    visit.page.get_by_role("button", name="Sleep").wait_for()
    operators.engines_until(lambda engines: {one.state for one in engines} == {EngineState.READY}, "demo")


def test_a_chart_shows_the_values_at_the_cursor(visit: Visit, operators: Operators) -> None:
    async def count(connection: CommandConnection) -> None:
        keys = operators.keys.model(CHARTED)
        await connection.execute(
            "HSET", operators.keys.models(), CHARTED, msgspec.json.encode(ModelCard(model=CHARTED))
        )
        start = int((await connection.execute("TIME"))[0]) // 60 * 60
        for minutes, tokens in ((10, 6000), (5, 12_000)):
            await connection.execute("HSET", keys.series(60, start - 60 * minutes), "tokens_out", tokens)

    operators.do(count)
    visit.open(f"/queue?model={CHARTED}")
    chart = visit.page.locator("svg.lines").first
    chart.focus()
    time, *_ = legend = visit.page.locator("figure .legend").first.locator("li").all()
    # The last steps are empty, and how many depends on the minute.
    for _ in range(60):
        if legend[2].inner_text() == "output 200":
            break
        chart.press("ArrowLeft")
    assert time.inner_text() != "latest"
    chart.press("ArrowLeft")
    playwright.expect(legend[2]).to_have_text("output -")
    assert time.inner_text() != "latest"
    chart.blur()
    playwright.expect(time).to_have_text("latest")
    playwright.expect(legend[2]).to_have_text("output 200")
    chart.hover()
    playwright.expect(time).not_to_have_text("latest")


def test_a_viewer_has_no_buttons_and_is_refused(chromium: Any, site: LocalServer, operators: Operators) -> None:
    visit = Visit(chromium, site, operators.key(Role.VIEWER, sees_contents=False))
    visit.open("/queue?model=demo")
    assert visit.page.get_by_role("button", name="Pause").count() == 0
    refused = visit.page.evaluate("fetch('/queue/pause', {method: 'POST', body: 'model=demo'}).then(r => r.status)")
    assert refused == 403
    visit.page.get_by_role("button", name="Log out").click()
    visit.page.wait_for_url("**/login")
    visit.open("/queue")
    assert "/login?next=" in visit.page.url
    visit.context.close()
    assert [one for one in visit.troubles if "403" not in one] == []


def test_the_pages_work_without_scripts(chromium: Any, site: LocalServer, admin_key: str, operators: Operators) -> None:
    visit = Visit(chromium, site, admin_key, java_script_enabled=False)
    visit.open("/queue?model=demo")
    visit.page.get_by_role("button", name="Pause", exact=True).click()
    visit.page.get_by_text("demo is paused").wait_for()
    visit.page.get_by_role("button", name="Resume").click()
    visit.page.get_by_text("demo is resumed").wait_for()
    visit.context.close()
    assert visit.troubles == []


def test_keys_of_the_keyboard(visit: Visit) -> None:
    visit.open("/queue?model=demo")
    visit.wait_until_live()
    visit.page.keyboard.press("/")
    assert visit.page.evaluate("document.activeElement.name") == "q"
    visit.page.keyboard.press("Escape")
    visit.page.evaluate("document.activeElement.blur()")
    visit.page.keyboard.press("?")
    visit.page.get_by_role("heading", name="Keys", exact=True).wait_for()


def test_a_hidden_tab_stops_and_resumes_updates(visit: Visit) -> None:
    visit.open("/")
    visit.wait_until_live()
    hide = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => %s});"
    tell = "document.dispatchEvent(new Event('visibilitychange'));"
    visit.page.evaluate("document.addEventListener('htmx:sse:before:connection', () => { window.numConnections = 1 })")
    visit.page.evaluate(hide % "true" + tell)
    assert visit.page.evaluate("window.numConnections") is None
    visit.page.evaluate(hide % "false" + tell)
    visit.page.wait_for_function("window.numConnections === 1")
    visit.page.evaluate("document.getElementById('pulse').className = ''")
    visit.wait_until_live()
