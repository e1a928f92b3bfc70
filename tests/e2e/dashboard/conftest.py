"""Fixtures of the dashboard in a browser: the deployment, its operators, and Chromium with a session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import pytest

from penstock.ops.local.server import LocalServer
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.producer.control.secret_keys import OperatorKeys, Role
from penstock.producer.inputs.prompt import build_request, encode_request
from penstock.shared.broker import Broker, EngineCapacity
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.presence import read_heartbeats
from penstock.shared.deployment.records import DeathCause, EngineHeartbeat, ModelCard
from penstock.shared.keys import Keys

from ...browser import PATIENCE_MS, running_chromium
from ...processes import DEADLINE_S

T = TypeVar("T")
UNSERVED = "poisoned"
# Nothing but its test counts in its series.
CHARTED = "charted"
# No other test has its workers, which leave.
LEAVING = "leaving"
UNSERVED_MODELS = (UNSERVED, CHARTED, LEAVING)
EVIL = "<img src=x onerror=alert(1)>\u202e"


class Operators:
    """The tests' actions on the deployment, in a thread of its own: playwright has a loop in this one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys = Keys()
        self._thread = ThreadPoolExecutor(1)

    def do(self, work: Callable[[CommandConnection], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            connection = CommandConnection(self.url)
            try:
                return await work(connection)
            finally:
                await connection.close()

        return self.aside(lambda: asyncio.run(connected()))

    def aside(self, work: Callable[[], T]) -> T:
        """Run work that may not run beside a loop, such as a start of processes."""
        return self._thread.submit(work).result()

    def key(self, role: Role, *, sees_contents: bool = True) -> str:
        async def work(connection: CommandConnection) -> str:
            return (await OperatorKeys(connection, self.keys).create(role.value, role, sees_contents=sees_contents))[0]

        return self.do(work)

    def submit(self, request_id: str, *, model: str = "demo", **options: Any) -> None:
        async def work(_: CommandConnection) -> None:
            async with Client.connect(self.url, model=model) as client:
                params = SamplingParams(max_tokens=40, min_tokens=40, temperature=0.0)
                await client.submit("count from one to nine:", params, request_id=request_id, **options)

        self.do(work)

    def park(self, request_id: str) -> None:
        """A request of a model that no worker serves, on which an engine of the test's own has died."""

        async def work(connection: CommandConnection) -> None:
            card = ModelCard(model=UNSERVED)
            await connection.execute("HSET", self.keys.models(), card.model, msgspec.json.encode(card))
            broker = Broker(connection, self.keys.model(card.model))
            request = build_request(EVIL, SamplingParams(), card=card, options={"request_id": request_id})
            await broker.enqueue(request_id, encode_request(request), result_ttl_ms=600_000)
            await broker.claim("test-1", EngineCapacity(max_num_seqs=1))
            cause = DeathCause(engine_id="test-1", reason="killed by signal 11", trace="Traceback: <b>x</b>")
            await broker.reclaim("test-1", cause, is_external=False, max_deliveries=1)

        self.do(work)

    def state(self, request_id: str, model: str) -> str:
        return self.do(lambda connection: Broker(connection, self.keys.model(model)).state(request_id))

    def engines_until(self, condition: Callable[[list[EngineHeartbeat]], bool], model: str) -> list[EngineHeartbeat]:
        """Return the model's engines in Redis once they meet the condition."""

        async def work(connection: CommandConnection) -> list[EngineHeartbeat]:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    beats = await read_heartbeats(connection.execute, self.keys)
                    engines = [beat for beat in beats if beat.model == model]
                    if condition(engines):
                        return engines
                    await asyncio.sleep(0.05)

        return self.do(work)

    def close(self) -> None:
        """Leave the deployment, which other tests look at, without the models that no engine serves."""

        async def work(connection: CommandConnection) -> None:
            await connection.execute("HDEL", self.keys.models(), *UNSERVED_MODELS)
            for model in UNSERVED_MODELS:
                for key in await connection.execute("KEYS", self.keys.model(model).pattern):
                    await connection.execute("DEL", key)

        self.do(work)
        self._thread.shutdown()


@pytest.fixture(scope="module")
def operators(deployment: LocalStack) -> Iterator[Operators]:
    operators = Operators(deployment.url)
    yield operators
    operators.close()


@pytest.fixture(scope="module")
def site(deployment: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """`penstock dashboard` with a login."""
    log_path = tmp_path_factory.mktemp("dashboard") / "dashboard.log"
    with LocalServer("dashboard", deployment.url, ["--keys", "on"], log_path) as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with running_chromium() as browser:
        yield browser


class Visit:
    """A browser with a session; notes errors in it, and every request that leaves the dashboard.

    Args:
        key: of the operator who logs in; empty if ``options`` have a session.
    """

    def __init__(self, chromium: Any, site: LocalServer, key: str = "", **options: Any) -> None:
        self.address = site.base_url
        self.context = chromium.new_context(**options)
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.troubles: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.troubles.append(f"dialog: {dialog.message}"))
        self.page.on("request", self._on_request)
        if key:
            self._log_in(key)

    def _log_in(self, key: str) -> None:
        self.open("/login")
        self.page.get_by_label("Operator's key").fill(key)
        self.page.get_by_role("button", name="Log in").click()
        self.page.wait_for_url(f"{self.address}/")

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.troubles.append(f"console: {message.text}")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:")):
            self.troubles.append(f"left the origin: {request.url}")

    def open(self, path: str) -> None:
        self.page.goto(self.address + path)

    def wait_until_live(self) -> None:
        self.page.wait_for_selector("#pulse.good")

    def expect(self, selector: str, text: str) -> None:
        playwright = pytest.importorskip("playwright.sync_api")
        playwright.expect(self.page.locator(selector).first).to_have_text(text, timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def admin_key(operators: Operators) -> str:
    return operators.key(Role.ADMIN)


@pytest.fixture(scope="module")
def session(chromium: Any, site: LocalServer, admin_key: str) -> Any:
    """The cookies of a browser in which an admin has logged in."""
    visit = Visit(chromium, site, admin_key)
    cookies = visit.context.storage_state()
    visit.context.close()
    assert visit.troubles == []
    return cookies


@pytest.fixture
def visit(chromium: Any, site: LocalServer, session: Any) -> Iterator[Visit]:
    visit = Visit(chromium, site, storage_state=session)
    yield visit
    visit.context.close()
    assert visit.troubles == []
