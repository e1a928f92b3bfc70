"""A record of another process that cannot be read, as one of a newer version: it hides nothing else."""

from __future__ import annotations

import logging

import msgspec
import pytest

from penstock.producer import Client, SamplingParams
from penstock.producer.control.deployment import read_deployment
from penstock.producer.gateway.auth import ApiKeys
from penstock.producer.webhooks.secrets import SecretStore
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment import records as unreadable_records
from penstock.shared.deployment.audit import Audit
from penstock.shared.deployment.presence import Presence, ProcessKind, read_heartbeats, read_processes
from penstock.shared.deployment.records import UNREADABLE, EngineHeartbeat
from penstock.shared.keys import Keys
from penstock.shared.lora.registry import AdapterRegistry
from penstock.shared.messages.supervision import EngineState
from penstock.shared.partitions.layout import read_layouts

from .harness import claim_one

JUNK = (b"{", b"[]", b"\xff", b'{"version": 99, "state": "levitating"}')


@pytest.fixture
def keys(namespace: str, broker: Broker) -> Keys:
    return Keys(namespace)


@pytest.mark.parametrize("junk", JUNK)
async def test_a_model_card(
    client: Client,
    commands: CommandConnection,
    broker: Broker,
    keys: Keys,
    junk: bytes,
    log_records: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unreadable_records, "_reported", set())
    await commands.execute("HSET", keys.models(), "newer", junk)
    models = await client.models()
    assert await client.models() == models
    assert (models["m"].max_model_len, models["newer"].architecture) == (100, UNREADABLE)
    await client.submit("hi", SamplingParams(), model="m", request_id="r")
    assert (await claim_one(broker)).request_id == "r"
    # Its workers know what it takes.
    await client.submit("hi", SamplingParams(max_tokens=5), model="newer")
    assert (await client.queue_stats("newer")).depth == 1
    told = [record.getMessage() for record in log_records if "record_unreadable" in record.getMessage()]
    assert len(told) == 1
    assert "newer" in told[0]


@pytest.mark.parametrize("junk", JUNK)
async def test_a_heartbeat_and_a_process_record(
    client: Client, commands: CommandConnection, keys: Keys, junk: bytes
) -> None:
    beat = EngineHeartbeat(
        worker_id="w", engine_id="w-0", model="m", state=EngineState.READY, host="h", worker_pid=1, core_pid=2
    )
    for engine_id, data in (("w-0", msgspec.json.encode(beat)), ("newer-0", junk)):
        await commands.execute("SADD", keys.engines(), engine_id)
        await commands.execute("SET", keys.engine(engine_id), data)
    await commands.execute("SADD", keys.processes(), "newer-1")
    await commands.execute("SET", keys.process("newer-1"), junk)
    await Presence(commands, keys, ProcessKind.GATEWAY).say()

    assert [engine.engine_id for engine in await client.engines("m")] == ["w-0"]
    await client.check_health("m")
    unreadable: list[str] = []
    await read_heartbeats(commands.execute, keys, unreadable=unreadable)
    assert unreadable == ["newer-0"]
    processes = {process.kind: process.process_id for process in await read_processes(commands.execute, keys)}
    assert processes[UNREADABLE] == "newer-1"
    assert ProcessKind.GATEWAY in processes
    deployment = await read_deployment(commands, keys)
    messages = [finding.message for finding in deployment.findings if finding.code == "engine_unreadable"]
    assert messages == [f"the heartbeat of engine newer-0 is {UNREADABLE}"]


@pytest.mark.parametrize("junk", JUNK)
async def test_other_lists(commands: CommandConnection, keys: Keys, junk: bytes) -> None:
    await SecretStore(commands, keys).create("t")
    await ApiKeys(commands, keys).create("t")
    async with Audit(commands, keys).audited("queue.pause", "m"):
        pass
    for key in (keys.webhook_secrets(), keys.api_keys(), keys.adapters(), keys.layouts()):
        await commands.execute("HSET", key, "newer", junk)
    await commands.execute("XADD", keys.audit(), "*", "entry", junk)
    assert [secret.tenant for secret in await SecretStore(commands, keys).list()] == ["t"]
    # An object of the first four may be a whole record of another kind.
    assert [key.tenant for key in await ApiKeys(commands, keys).list()][:1] == ["t"]
    assert await AdapterRegistry(commands, keys).read() == []
    assert "m" not in await read_layouts(commands, keys)
    assert {entry.action for entry in await Audit(commands, keys).read()} >= {"queue.pause", UNREADABLE}
