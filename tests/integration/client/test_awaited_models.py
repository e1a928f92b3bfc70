"""Requests for a model that no worker has served yet are seen everywhere, so that a typo is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from penstock.ops.cli import main
from penstock.producer import Client, SamplingParams
from penstock.producer.control.deployment import read_deployment, read_models
from penstock.producer.requests import model_cards
from penstock.producer.requests.model_cards import AwaitedModels
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat, ModelCard
from penstock.shared.errors import UnknownModelError
from penstock.shared.keys import Keys
from penstock.shared.messages.supervision import EngineState
from penstock.shared.redis_access.rights import Role, rights

from ...captured_logs import capture_logs
from ...redis_server import RedisServer, acl_version

KNOWN = "qwen-3-8b"
TYPO = "qwen3-8b"


@pytest.fixture
async def waiting_client(redis_url: str, namespace: str, commands: CommandConnection) -> AsyncIterator[Client]:
    await register(commands, namespace, KNOWN)
    async with Client.connect(redis_url, namespace=namespace, wait_for_model=True) as client:
        yield client


async def register(commands: CommandConnection, namespace: str, model: str) -> None:
    await commands.execute("HSET", Keys(namespace).models(), model, msgspec.json.encode(ModelCard(model=model)))


async def test_status_names_the_model_and_the_likely_name(
    waiting_client: Client, commands: CommandConnection, namespace: str
) -> None:
    for _ in range(2):
        await waiting_client.submit("hi", SamplingParams(max_tokens=3), model=TYPO)
    deployment = await read_deployment(commands, Keys(namespace))
    assert deployment.awaited == [TYPO]
    assert {stats.model: stats.depth for stats in deployment.queues} == {KNOWN: 0, TYPO: 2}
    (finding,) = [finding for finding in deployment.findings if finding.is_error]
    assert finding.code == "unknown_model"
    assert f"no worker has ever served model {TYPO}, and 2 requests wait for it" in finding.message
    assert f"known models: {KNOWN}; did you mean {KNOWN}?" in finding.message


async def test_a_known_model_without_engines_is_reported_with_its_waiting_requests(
    waiting_client: Client, commands: CommandConnection, namespace: str
) -> None:
    await waiting_client.submit("hi", SamplingParams(max_tokens=3), model=KNOWN)
    deployment = await read_deployment(commands, Keys(namespace))
    (finding,) = [finding for finding in deployment.findings if finding.is_error]
    assert (finding.code, deployment.awaited) == ("no_engine", [])
    assert f"no engine serves model {KNOWN}, and 1 request waits for it" in finding.message


async def test_figures_count_it_so_that_workers_are_scaled_from_none(
    waiting_client: Client, commands: CommandConnection, namespace: str
) -> None:
    handle = await waiting_client.submit("hi", SamplingParams(max_tokens=3), model=TYPO)
    states = await read_models(commands, Keys(namespace))
    assert states is not None
    assert {state.model: state.queue and state.queue.depth for state in states} == {KNOWN: 0, TYPO: 1}
    await handle.cancel()
    states = await read_models(commands, Keys(namespace))
    assert states is not None
    assert [state.model for state in states] == [KNOWN]


async def test_commands_show_it(
    waiting_client: Client, redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = await waiting_client.submit("hi", SamplingParams(max_tokens=3), model=TYPO)
    options = ["--redis-url", redis_url, "--namespace", namespace]

    async def run(*words: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, [*words, *options])
        return status, capsys.readouterr().out

    status, out = await run("status")
    assert (status, f"did you mean {KNOWN}?" in out) == (1, True)
    status, out = await run("queue", "list")
    assert (status, TYPO in out) == (0, True)
    status, out = await run("queue", "show", TYPO)
    assert (status, f"no worker has ever served model {TYPO}, and 1 request waits" in out) == (0, True)
    status, out = await run("queue", "show", TYPO, "--request", handle.request_id)
    assert (status, "queued" in out) == (0, True)


async def test_the_client_logs_an_awaited_model_once_with_a_suggestion(
    waiting_client: Client, commands: CommandConnection, namespace: str
) -> None:
    with capture_logs() as logs:
        handle = await waiting_client.submit("hi", SamplingParams(max_tokens=3), model=TYPO)
        await waiting_client.submit("hi", SamplingParams(max_tokens=3), model=TYPO)
    (line,) = [line for line in logs if line["event"] == "model_awaited"]
    assert (line["model"], line["known"]) == (TYPO, f"known models: {KNOWN}; did you mean {KNOWN}?")
    assert (await waiting_client.status(handle.request_id, TYPO)).num_engines == 0
    beat = EngineHeartbeat(
        worker_id="w", engine_id="e", model=TYPO, state=EngineState.READY, host="h", worker_pid=1, core_pid=2
    )
    await commands.execute("SADD", Keys(namespace).engines(), "e")
    await commands.execute("SET", Keys(namespace).engine("e"), msgspec.json.encode(beat))
    assert (await waiting_client.status(handle.request_id, TYPO)).num_engines == 1


async def test_a_typo_is_refused_with_the_likely_name(
    redis_url: str, namespace: str, commands: CommandConnection
) -> None:
    await register(commands, namespace, KNOWN)
    async with Client.connect(redis_url, namespace=namespace) as client:
        with pytest.raises(UnknownModelError, match=rf"known models: {KNOWN}; did you mean {KNOWN}\?"):
            await client.submit("hi", model=TYPO)


async def test_a_name_is_forgotten_with_its_card_or_after_its_last_request(
    waiting_client: Client, commands: CommandConnection, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Keys(namespace).awaited_models()
    handles = [await waiting_client.submit("hi", SamplingParams(max_tokens=3), model=name) for name in ("a", "b", "c")]
    await handles[0].cancel()
    await register(commands, namespace, "b")
    models = AwaitedModels(commands, Keys(namespace))
    assert await models.read(["b"]) == ["c"]
    assert sorted(await commands.execute("HKEYS", key)) == [b"a", b"c"]
    monkeypatch.setattr(model_cards, "KEPT_S", -60.0)
    assert await models.read(["b"]) == ["c"]
    assert await commands.execute("HKEYS", key) == [b"c"]


async def test_users_of_an_older_version_may_still_enqueue(server: RedisServer) -> None:
    """They have no right on the key."""
    keys = Keys()
    words = rights(Role.CLIENT, keys.namespace, await asyncio.to_thread(acl_version))
    old = [word for word in words if word != f"~{keys.awaited_models()}"]
    await asyncio.to_thread(server.execute, "ACL", "SETUSER", "old", "on", ">pw", *old)
    async with Client.connect(server.url.replace("unix://", "unix://old:pw@"), wait_for_model=True) as client:
        with capture_logs() as logs:
            handle = await client.submit("hi", SamplingParams(max_tokens=3), model="m")
        assert (await client.status(handle.request_id, "m")).state == "queued"
    assert "model_not_recorded" in [line["event"] for line in logs]
