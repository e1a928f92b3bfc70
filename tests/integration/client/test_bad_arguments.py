"""Strings that cannot be a name, an id, or text at all, in every call that takes one: an error that names the field."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.ops.cli import main
from penstock.producer import LLM, Client, SamplingParams
from penstock.producer.background.agenda import Agenda
from penstock.producer.batches.batch_store import BatchStore
from penstock.producer.gateway.auth import ApiKeys
from penstock.producer.webhooks.event_store import EventStore
from penstock.producer.webhooks.secrets import SecretStore
from penstock.shared.broker import Broker, Queue
from penstock.shared.broker.dead_letter import DeadLetter
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.errors import PenstockError, UnknownModelError, ValidationError
from penstock.shared.keys import Keys
from penstock.shared.params.lora import LoRARequest

from ...redis_server import RedisServer

SURROGATE = "hi\ud800"
LONG = "x" * 1_000_000
MAX_CHARS = 1000

Call = Callable[[Any], Awaitable[Any]]


def calls_of(client: Client) -> dict[str, Call]:
    return {
        "model": lambda value: client.queue_stats(model=value),
        "request_id of status": lambda value: client.status(value),
        "request_id of handle": lambda value: client.handle(value),
        "request_id of cancel": lambda value: client.cancel(value),
        "request_id of abort": lambda value: client.abort(["a", value]),
        "request_id of submit": lambda value: client.submit("hi", request_id=value),
        "request_id of add_request": lambda value: client.add_request(value, "hi"),
        "tenant of configure_tenant": lambda value: client.configure_tenant(value, None),
        "tenant of purge": lambda value: client.purge(value),
        "band of purge": lambda value: client.purge("t", band=value),
        "mode of pause_generation": lambda value: client.pause_generation(mode=value),
        "mode of sleep": lambda value: client.sleep(mode=value),
        "tags of wake_up": lambda value: client.wake_up([value]),
        "path of save_sharded_state": lambda value: client.save_sharded_state(f"/{value}"),
        "method of collective_rpc": lambda value: client.collective_rpc(value),
        "args of collective_rpc": lambda value: client.collective_rpc("m", [{"a": value}]),
        "kwargs.a of collective_rpc": lambda value: client.collective_rpc("m", kwargs={"a": value}),
        "engine of is_sleeping": lambda value: client.is_sleeping(engine_id=value),
        "prompt of tokenize": lambda value: client.tokenize(value),
        "messages[0].content of tokenize": lambda value: client.tokenize([{"role": "user", "content": value}]),
        "lora_name of add_lora": lambda value: client.add_lora(LoRARequest(value, 1, "/a")),
    }


def operator_calls_of(
    commands: CommandConnection, keys: Keys, batches: BatchStore, secret: str = "whsec_" + "A" * 32
) -> dict[str, Call]:
    queue, letter, secrets = Queue(commands, keys.model("m")), DeadLetter(commands, keys.model("m")), SecretStore
    events, api_keys = EventStore(commands, keys, Agenda(commands, keys)), ApiKeys(commands, keys)
    files = batches.files
    return {
        "request_id of show": lambda value: letter.show(value),
        "request_id of purge": lambda value: letter.purge(value),
        "request_id of replay": lambda value: letter.replay(value),
        "tenant of Queue.purge": lambda value: queue.purge(value),
        "event_id of show": lambda value: events.show(value),
        "event_id of purge": lambda value: events.purge(value),
        "tenant of create": lambda value: secrets(commands, keys).create(value, secret=secret),
        "url of create": lambda value: secrets(commands, keys).create("t", value),
        "url of delete": lambda value: secrets(commands, keys).delete("t", value),
        "a secret of create": lambda value: secrets(commands, keys).create("t", "", value),
        "tenant of ApiKeys.create": lambda value: api_keys.create(value),
        "name of ApiKeys.create": lambda value: api_keys.create("t", name=value),
        "key_id of ApiKeys.revoke": lambda value: api_keys.revoke(value),
        "batch_id of get": lambda value: batches.get(value),
        "batch_id of cancel": lambda value: batches.cancel(value),
        "tenant of list": lambda value: batches.list(tenant=value),
        "after of list": lambda value: batches.list(after=value),
        "file_id of get": lambda value: files.get(value),
        "tenant of files.list": lambda value: files.list(tenant=value),
        "endpoint of create": lambda value: batches.create(input_file_id="f", endpoint=value),
    }


async def check(calls: Mapping[str, Call], value: Any) -> None:
    for name, call in calls.items():
        try:
            await call(value)
        except PenstockError as error:
            message, field = str(error), name.partition(" of ")[0]
            assert len(message) < MAX_CHARS, name
            assert message.encode(), name
            assert value != SURROGATE or field in message, (name, message)
        else:
            assert value != SURROGATE, name


@pytest.fixture
async def operator_calls(
    commands: CommandConnection, redis_url: str, namespace: str, broker: Broker, tmp_path: Path
) -> Any:
    async with BatchStore(redis_url, tmp_path, namespace=namespace) as batches:
        yield operator_calls_of(commands, Keys(namespace), batches)


@pytest.mark.parametrize("value", [SURROGATE, LONG], ids=["surrogate", "megabyte"])
async def test_calls_of_a_client_refuse_by_name(client: Client, value: str) -> None:
    await check(calls_of(client), value)


@pytest.mark.parametrize("value", [SURROGATE, LONG], ids=["surrogate", "megabyte"])
async def test_calls_of_an_operator_refuse_by_name(operator_calls: dict[str, Call], value: str) -> None:
    await check(operator_calls, value)


async def test_a_model_is_a_name(redis_url: str, namespace: str, client: Client) -> None:
    for wrong in (["m"], 5, "a{b", "x" * 201):
        with pytest.raises(ValidationError, match=r"^model must"):
            await client.queue_stats(model=wrong)  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(UnknownModelError):
        await client.queue_stats(model="x" * 200)


async def test_nothing_is_in_line_of_a_request_that_cannot_be_encoded(client: Client) -> None:
    with pytest.raises(ValidationError, match=r"^messages\[0\]\.name must be plain data"):
        await client.submit_many(["hi", [{"role": "user", "content": "hi", "name": object()}]])
    assert (await client.queue_stats()).depth == 0


async def test_text_that_no_check_knows_of_is_refused_before_it_is_sent(commands: CommandConnection) -> None:
    with pytest.raises(ValidationError, match=r"^an argument of SET must be text that UTF-8 can encode"):
        await commands.execute("SET", "key", SURROGATE)
    assert await commands.execute("PING") == b"PONG"


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0, -1.0, True, "60", 1e12])
def test_a_time_to_live_that_redis_cannot_keep_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="result_ttl_s must be a number of seconds"):
        Client("redis://localhost", result_ttl_s=value)


def test_a_batch_into_a_missing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}\n')
    status = main(["batch", "run", str(rows), "-o", "/nope/out.jsonl", "--redis-url", "redis://localhost:1"])
    said = capsys.readouterr().err
    assert status == 2
    assert said.startswith("error: /nope/out.jsonl cannot be written: /nope is not a writable folder")


def test_adding_by_hand_returns_the_id_and_an_abort_needs_no_model(server: RedisServer) -> None:
    for name in ("m", "other"):
        server.execute("HSET", Keys().models(), name, msgspec.json.encode(ModelCard(model=name)).decode())
    with LLM(server.url) as llm:
        assert llm.add_request("r", "hi", SamplingParams(max_tokens=1), model="m") == "r"
        llm.abort_request("r")
        assert not llm.has_unfinished_requests()
        assert llm.call(llm.client.status("r", "m")).state == "cancelled"
