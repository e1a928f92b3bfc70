"""The gateway as HTTP: heads, statuses, keys, metrics, resumed streams, and requests that schemathesis draws."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from penstock.ops.cli import main
from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client

from ...gate import Gate
from ...processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

CHAT = "/v1/chat/completions"
COUNT = "count from four to nine:"
COUNTED = " four five six seven eight nine."


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": COUNT}], "temperature": 0, **fields}


@pytest.fixture
def http(gateway: LocalGateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.root_url, timeout=DEADLINE_S) as http:
        yield http


@pytest.fixture
async def async_http(gateway: LocalGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.root_url, timeout=DEADLINE_S) as http:
        yield http


def test_an_event_is_one_line_for_readers_that_split_as_python_does(http: httpx.Client) -> None:
    """httpx splits text at U+0085, U+2028 and U+2029, too."""
    text = "a\x85b\u2028c\u2029d"
    escaped = json.dumps(text)[1:-1]
    for path, body in (
        ("/v1/completions", {"prompt": text, "echo": True, "max_tokens": 1}),
        ("/v1/responses", {"input": text, "metadata": {"text": text}, "max_output_tokens": 1}),
    ):
        with http.stream("POST", path, json={"model": "demo", "stream": True, **body}) as reply:
            assert reply.status_code == 200, reply.read()
            lines = list(reply.iter_lines())
        assert {line.partition(": ")[0] for line in lines} <= {"", "id", "event", "data"}
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert any(escaped in json.dumps(event) for event in events)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_a_stream(gateway: LocalGateway) -> None:
    command = ["curl", "-sSN", f"{gateway.base_url}/chat/completions", "-H", "content-type: application/json"]
    result = subprocess.run([*command, "-d", json.dumps(chat(stream=True))], capture_output=True, text=True, check=True)
    events = [event.split("\n") for event in result.stdout.strip().split("\n\n")]
    assert events[-1] == ["data: [DONE]"]
    chunks = [json.loads(data.removeprefix("data: ")) for _, data in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == COUNTED
    ids = [event_id.removeprefix("id: ") for event_id, _ in events[:-1]]
    assert ids[-1] == f"{chunks[0]['id']}:8e"
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", CHAT, b"{", 400, "invalid_json"),
        ("POST", CHAT, b"\xff\xfe", 400, "invalid_json"),
        ("POST", "/tokenize", b"{}", 400, None),
        ("GET", CHAT, b"", 405, "http_error"),
        ("GET", "/v1/nothing", b"", 404, "unknown_url"),
    ],
)
def test_refusals_have_openais_form(
    http: httpx.Client, method: str, path: str, content: bytes, status: int, code: str | None
) -> None:
    answer = http.request(method, path, content=content)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code


def test_a_body_without_a_length_is_cut_off_at_the_limit(http: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    answer = http.post(CHAT, content=endless())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_request_id_is_echoed_or_drawn_and_other_sites_are_not_let_in(http: httpx.Client) -> None:
    headers = {"x-request-id": "abc-1", "origin": "https://example.org"}
    response = http.get("/version", headers=headers)
    assert response.headers["x-request-id"] == "abc-1"
    assert "access-control-allow-origin" not in response.headers
    assert re.fullmatch("[0-9a-f]{32}", http.get("/version").headers["x-request-id"])


@pytest.mark.parametrize("request_id", ["no spaces", "x" * 201])
def test_a_request_id_that_cannot_be_echoed_is_refused(http: httpx.Client, request_id: str) -> None:
    refused = http.get("/version", headers={"x-request-id": request_id})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-request-id"
    assert refused.json()["error"]["message"].startswith("x-request-id must be 1 to 200 visible ASCII characters, got ")
    assert re.fullmatch("[0-9a-f]{32}", refused.headers["x-request-id"])


def test_parts_of_text_equal_one_text(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": text} for text in COUNT.split(" ")]
    bodies = [chat(messages=[{"role": "user", "content": content}]) for content in (COUNT.replace(" ", "\n"), parts)]
    answers = [http.post(CHAT, json=body).raise_for_status().json() for body in bodies]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    for path in (CHAT, "/tokenize"):
        body = {"model": "demo", "messages": [{"role": "user", "content": [*parts, sound]}]}
        refused = http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[5].type")


def test_a_message_never_repeats_a_megabyte(http: httpx.Client) -> None:
    long = "x" * 1_000_000
    user = {"role": "user", "content": "hi"}
    bodies = [chat(model=long), chat(band=long), chat(cache_salt=long), chat(messages=[{**user, "role": long}])]
    bodies += [chat(**{long: 1}), chat(reasoning_effort=long), chat(tool_choice=long), chat(service_tier=long, n=0)]
    for body in bodies:
        refused = http.post(CHAT, json=body)
        assert 400 <= refused.status_code < 500
        assert len(refused.content) < 2000


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat()), ("/v1/responses", {"model": "demo", "input": "spell 7:", "temperature": 0})]
)
def test_the_ids_of_a_request_stand_in_the_lines_of_gateway_and_worker(
    http: httpx.Client, gateway: LocalGateway, deployment: LocalStack, path: str, body: dict[str, Any]
) -> None:
    trace_id, x_request_id = uuid.uuid4().hex, uuid.uuid4().hex
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": x_request_id}
    response_id = http.post(path, json=body, headers=headers).raise_for_status().json()["id"]
    ids = {"request_id": response_id, "x_request_id": x_request_id, "trace_id": trace_id}
    for log_of, event in ((lambda: gateway.log, "http_request"), (deployment.log_path.read_text, "request_finished")):
        deadline = time.monotonic() + 120
        while not (lines := [json.loads(line) for line in log_of().splitlines() if trace_id in line]):
            assert time.monotonic() < deadline, f"no line {event!r}"
            time.sleep(0.02)
        assert [(line["event"], {name: line[name] for name in ids}) for line in lines] == [(event, ids)]


def test_state_for_operators(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    # Other tests of this deployment may have left something to warn of: a webhook that no jobs are there to send.
    assert http.get("/ready").json()["status"] == "ok"
    http.post(CHAT, json=chat(stream=True))
    http.get("/v1/" + "x" * 20)
    text = http.get("/metrics").text
    route = f'route="{CHAT}"'
    assert re.search(rf'penstock_http_requests_total\{{method="POST",{route},status="200"\}} \d', text)
    assert re.search(rf"penstock_http_time_to_first_chunk_seconds_count\{{{route}\}} [1-9]", text)
    assert "penstock_engine_up" not in text  # every gateway would tell it, and sums would be too large
    assert "xxx" not in text


async def read_events(
    http: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str], *, leave_after: int | None = None
) -> list[tuple[str, Any]]:
    """Ids and chunks of a stream, up to its end or as many as ``leave_after`` says; [DONE] is left out."""
    events: list[tuple[str, Any]] = []
    event_id = ""
    async with http.stream("POST", CHAT, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif line.startswith("data: ") and line != "data: [DONE]":
                events.append((event_id, json.loads(line.removeprefix("data: "))))
                if len(events) == leave_after:
                    break
    return events


def texts_of(events: list[tuple[str, Any]], n: int) -> list[str]:
    texts = [""] * n
    for _, chunk in events:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    return texts


@pytest.mark.parametrize("n", [1, 3])
async def test_a_cut_stream_is_picked_up_from_its_last_event(async_http: httpx.AsyncClient, n: int) -> None:
    body = chat(n=n, seed=5, temperature=1.2, stream=True, stream_options={"include_usage": True}, max_tokens=300)
    body |= {"ignore_eos": True, "logprobs": True}
    undisturbed = await read_events(async_http, body, {})
    expected = texts_of(undisturbed, n)
    events, headers = [], {}
    for leave_after in (2, 3, None):
        events += await read_events(async_http, body, headers, leave_after=leave_after)
        headers = {"Last-Event-ID": events[-1][0]}
    assert texts_of(events, n) == expected
    assert len({event_id for event_id, _ in events}) == len(events)
    assert events[-1][1]["usage"] == undisturbed[-1][1]["usage"]
    tokens = [len(c["logprobs"]["content"]) for _, chunk in events for c in chunk["choices"] if c.get("logprobs")]
    assert sum(tokens) == 300 * n
    roles = [choice for _, chunk in events for choice in chunk["choices"] if "role" in choice["delta"]]
    assert len(roles) == n
    assert await read_events(async_http, body, headers) == []


async def test_streams_that_cannot_be_resumed_give_a_reason(async_http: httpx.AsyncClient) -> None:
    unknown = f"chatcmpl-{'0' * 32}:3"
    for event_id, body, status in (
        (unknown, chat(stream=True), 404),
        (unknown, chat(), 400),
        (unknown, chat(stream=True, n=2), 400),
        ("what is this", chat(stream=True), 400),
    ):
        answer = await async_http.post(CHAT, json=body, headers={"Last-Event-ID": event_id})
        assert answer.status_code == status, answer.text


async def test_a_stream_is_picked_up_by_the_body_that_began_it_alone(async_http: httpx.AsyncClient, gate: Gate) -> None:
    body = chat(stream=True, ignore_eos=True, max_tokens=50)
    gate.hold_at(10)  # or the first event may be all that there is
    ((event_id, _),) = await read_events(async_http, body, {}, leave_after=1)
    gate.open()
    headers = {"Last-Event-ID": event_id}
    for other in ({"max_tokens": 40}, {"logprobs": True}, {"messages": [{"role": "user", "content": "spell 7:"}]}):
        answer = await async_http.post(CHAT, json=body | other, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_last_event_id")
        assert "another body" in answer.json()["error"]["message"]
    assert await read_events(async_http, dict(reversed(body.items())) | {"audio": None}, headers)


def test_a_405_names_every_method_of_its_path(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        concrete = re.sub(r"\{\w+\}", "x", path)
        refused = http.request("PATCH", concrete)
        allowed = {method.upper() for method in methods}
        assert refused.status_code == 405
        assert set(refused.headers["allow"].split(", ")) == allowed | ({"HEAD"} if "GET" in allowed else set())
        assert refused.headers["x-request-id"]


def test_models_have_the_time_since_when_they_are_served(http: httpx.Client) -> None:
    (model,) = [one for one in http.get("/v1/models").json()["data"] if one["id"] == "demo"]
    assert abs(model["created"] - time.time()) < 24 * 3600
    assert http.get("/v1/models/demo").json() == model
    assert model["context_length"] == model["max_output_tokens"] == model["max_model_len"] == 2048
    assert set(model["capabilities"]) >= {"chat", "completions", "structured_outputs"}
    assert "vision" not in model["capabilities"]
    assert http.head("/v1/models").status_code == 200


def test_api_keys_stand_for_tenants(
    deployment: LocalStack, gate: Gate, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a gateway of its own, which is stopped in the middle of an answer: it lets it end."""

    def penstock(*arguments: str) -> str:
        assert main([*arguments, "--redis-url", deployment.url]) == 0
        return capsys.readouterr().out.strip()

    acme = penstock("keys", "create", "acme", "--band", "interactive", "--name", "web")
    other, limited = penstock("keys", "create", "other"), penstock("keys", "create", "limited")
    assert acme not in penstock("keys", "list", "--json")
    folder = tmp_path_factory.mktemp("keys")
    log_path, prices = folder / "gateway.log", folder / "prices.toml"
    prices.write_text('currency = "EUR"\n[models.demo]\ninput = 1000000\ncached = 0\noutput = 0\n')
    options = ["--api-keys", "on", "--cors-origin", "https://example.org", "--prices", str(prices)]
    with (
        LocalGateway(deployment.url, options, log_path) as gateway,
        httpx.Client(base_url=gateway.root_url, timeout=DEADLINE_S) as http,
    ):
        check_keys(http, acme)
        check_usage(http, acme, other)
        quotas = ("--requests-per-minute", "50", "--tokens-per-minute", "90000")
        penstock("queue", "tenant", "demo", "limited", *quotas)
        check_quotas(http, limited, acme)
        penstock("budget", "set", "limited", "--tokens", "1")
        refused = http.post(CHAT, json=chat(), headers=bearer(limited))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert 0 < int(refused.headers["retry-after"]) <= 31 * 86400
        penstock("budget", "remove", "limited")

        long = chat(stream=True, ignore_eos=True, max_tokens=100)
        gate.hold_at(99)
        with http.stream("POST", CHAT, json=long, headers=bearer(acme)) as stream:
            lines = stream.iter_lines()
            event_id = next(lines).removeprefix("id: ")
            status = asyncio.run(status_of(deployment.url, event_id.partition(":")[0]))
            assert (status.tenant, status.band) == ("acme", "interactive")
            theirs = bearer(other) | {"Last-Event-ID": event_id}
            assert http.post(CHAT, json=long, headers=theirs).status_code == 404
            penstock("keys", "revoke", acme.split("-")[1])
            gateway_pid_ends(gateway)
            gate.open()
            assert list(lines)[-2] == "data: [DONE]"
        # A second signal would end it at once.
        assert gateway.await_end() == 0
    assert acme not in log_path.read_text()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def check_keys(http: httpx.Client, key: str) -> None:
    """Check that the key is accepted, and others are not, in the forms of both APIs."""
    wrong = f"{key[:-1]}~"
    for headers in ({}, bearer("x"), bearer(wrong)):
        refused = http.post(CHAT, json=chat(), headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    flipped = key[:-1] + ("A" if key[-1] != "A" else "B")
    assert http.get("/v1/models", headers=bearer(flipped)).status_code == 401
    assert http.get("/health").status_code == 200
    messages = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    for sent, status in ((key, 200), (wrong, 401), ("", 401)):
        counted = http.post("/v1/messages/count_tokens", json=messages, headers={"x-api-key": sent})
        assert counted.status_code == status
    assert counted.json()["error"]["type"] == "authentication_error"
    assert counted.json()["request_id"] == counted.headers["request-id"]
    allowed = http.get("/v1/models", headers=bearer(key) | {"origin": "https://example.org"})
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"


def check_usage(http: httpx.Client, key: str, unused: str) -> None:
    """Use the key once, and check what the ledger reports of it and of an unused one."""
    assert http.post(CHAT, json=chat(), headers=bearer(key)).status_code == 200
    for by, group in (("key", "web"), ("model", "demo")):
        usage = http.get("/v1/usage", params={"by": by}, headers=bearer(key)).json()
        rows = usage["data"]
        assert usage["currency"] == "EUR"
        assert usage["total"]["cost"] == sum(row["num_input_tokens"] - row["num_cached_tokens"] for row in rows)
        # Other tests have requests of this tenant, but none with the key.
        (used,) = (row for row in rows if row["group"] == group)
        assert used["num_requests"] == 1 or (by == "model" and used["num_requests"] > 1)
        assert used["num_input_tokens"] > 0 < used["num_output_tokens"]
    assert http.get("/v1/usage", headers=bearer(unused)).json()["data"] == []
    for params, name in (({"by": "tenant"}, "by"), ({"from": "x"}, "from")):
        assert http.get("/v1/usage", params=params, headers=bearer(key)).json()["error"]["param"] == name


def check_quotas(http: httpx.Client, limited: str, unlimited: str) -> None:
    """Check the headers that let clients pace themselves, with and without a stream."""
    for body in (chat(), chat(stream=True)):
        headers = http.post(CHAT, json=body, headers=bearer(limited)).headers
        assert headers["x-ratelimit-limit-requests"] == "50"
        assert 0 < int(headers["x-ratelimit-remaining-requests"]) < 50
        assert 80_000 < int(headers["x-ratelimit-remaining-tokens"]) < 90_000
        assert headers["x-ratelimit-reset-tokens"].endswith("ms")
    assert "x-ratelimit-limit-requests" not in http.post(CHAT, json=chat(), headers=bearer(unlimited)).headers


def gateway_pid_ends(gateway: LocalGateway) -> None:
    """Send SIGTERM, and wait until it accepts no more. It only connects: requests may be reset while it closes."""
    gateway.send_signal(signal.SIGTERM)
    where = urlsplit(gateway.root_url)
    assert where.hostname is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection((where.hostname, where.port or 80)).close()
        except ConnectionError:
            return
    raise AssertionError("it still accepts connections")


async def status_of(url: str, request_id: str) -> Any:
    async with Client.connect(url) as client:
        return await client.status(request_id)


def test_generated_requests_get_documented_responses(gateway: LocalGateway) -> None:
    """Whatever is sent: no 5xx, and each response as /openapi.json has it. Bounded by the number of examples."""
    schema = schemathesis.openapi.from_url(f"{gateway.root_url}/openapi.json")
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    bounded = settings(
        max_examples=3,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    counts: Counter[int] = Counter()

    def send(case: Any) -> None:
        if isinstance(case.body, dict) and not case.path.startswith(("/v1/files", "/v1/batches")):
            # Most made-up names are of no model, and answers may be as long as the model allows.
            case.body |= {"model": "demo"}
            if case.path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages"):
                case.body |= {"timeout_s": 0.2}
        response = case.call(timeout=DEADLINE_S)
        counts[response.status_code] += 1
        case.validate_response(response, checks=checks)

    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        has_body = bool(operation.body)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[: 1 + has_body]:
            bounded(given(operation.as_strategy(generation_mode=mode))(send))()
    assert counts[200] > 5
    assert counts[400] > 10
