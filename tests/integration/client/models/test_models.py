"""Which model is meant by a call that names none, and how a model is forgotten."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from penstock.producer import Client
from penstock.producer.requests import model_cards
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat, ModelCard
from penstock.shared.errors import UnknownModelError, ValidationError
from penstock.shared.keys import Keys
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.supervision import EngineState

from ..harness import CAUSE, claim_one, write


class Deployment:
    """Cards and heartbeats as workers leave them."""

    def __init__(self, commands: CommandConnection, namespace: str) -> None:
        self._commands = commands
        self._keys = Keys(namespace)

    async def serve(self, model: str, state: EngineState = EngineState.READY, restart_at: float = 0.0) -> None:
        engine_id = f"{model}-engine"
        beat = EngineHeartbeat(
            worker_id="w",
            engine_id=engine_id,
            model=model,
            state=state,
            host="h",
            worker_pid=1,
            core_pid=2,
            restart_at=restart_at,
        )
        card = ModelCard(model=model)
        await self._commands.execute("HSET", self._keys.models(), model, msgspec.json.encode(card))
        await self._commands.execute("SADD", self._keys.engines(), engine_id)
        await self._commands.execute("SET", self._keys.engine(engine_id), msgspec.json.encode(beat), "PX", 60_000)

    async def leave(self, model: str) -> None:
        await self._commands.execute("DEL", self._keys.engine(f"{model}-engine"))


async def look_again(client: Client) -> list[str]:
    """For a second a client goes by what it has just read."""
    return sorted(await client.models())


@pytest.fixture
def deployment(commands: CommandConnection, namespace: str) -> Deployment:
    return Deployment(commands, namespace)


async def test_a_model_that_was_tried_once_leaves_the_other_one_the_default(
    client: Client, deployment: Deployment
) -> None:
    await deployment.serve("m")
    assert (await client.submit("hi")).model == "m"
    await deployment.serve("tried")
    await look_again(client)
    with pytest.raises(ValidationError, match="model must be given: engines serve m, tried"):
        await client.get_model_config()
    await deployment.leave("tried")
    assert (await client.submit("hi")).model == "m"
    assert await look_again(client) == ["m", "tried"]
    await deployment.leave("m")
    await deployment.serve("tried")
    assert (await client.submit("hi")).model == "tried"


async def test_no_model_is_assumed_without_engines(client: Client, deployment: Deployment) -> None:
    assert (await client.submit("hi")).model == "m", "the only one that is known needs no engine"
    await deployment.serve("tried")
    await deployment.leave("tried")
    await look_again(client)
    with pytest.raises(ValidationError, match="this Redis knows m, tried, and no engine serves any of them now"):
        await client.get_num_unfinished_requests()


@pytest.mark.parametrize(
    ("state", "restart_at", "counts"),
    [
        (EngineState.STARTING, 0.0, True),
        (EngineState.STALLED, 0.0, True),
        (EngineState.DEAD, 4e9, True),
        (EngineState.DEAD, 0.0, False),
    ],
)
async def test_engines_that_restart_soon_count_as_serving(
    client: Client, deployment: Deployment, state: EngineState, restart_at: float, counts: bool
) -> None:
    """Otherwise a request without a model would go to another model during a restart."""
    await deployment.serve("m")
    await deployment.serve("other", state, restart_at)
    if counts:
        with pytest.raises(ValidationError, match="engines serve m, other"):
            await client.get_model_config()
    else:
        assert (await client.get_model_config()).model == "m"


async def test_a_model_in_use_cannot_be_forgotten(client: Client, broker: Broker, deployment: Deployment) -> None:
    await deployment.serve("m")
    with pytest.raises(ValidationError, match="it is served by m-engine"):
        await client.forget_model("m")
    await deployment.leave("m")
    handle = await client.submit("hi")
    with pytest.raises(ValidationError, match="1 of its requests wait or run"):
        await client.forget_model("m")
    claim = await claim_one(broker)
    with pytest.raises(ValidationError, match="1 of its requests wait or run"):
        await client.forget_model("m")
    await write(broker, claim, 0, 65, end=FinishReason.STOP)
    assert (await handle.result()).text == "A"
    poison = await client.submit("hi", request_id="poison")
    await claim_one(broker)
    await broker.reclaim("e0", CAUSE, is_external=False, max_deliveries=1)
    with pytest.raises(ValidationError, match="1 of its requests are parked; see penstock dead list"):
        await client.forget_model("m")
    assert list(await client.models()) == [poison.model]


async def test_a_forgotten_model_is_unknown_until_it_is_served_again(client: Client, deployment: Deployment) -> None:
    await client.forget_model("m")
    assert await client.models() == {}
    with pytest.raises(UnknownModelError, match="known models: none"):
        await client.submit("hi", model="m")
    with pytest.raises(UnknownModelError, match="known models: none"):
        await client.forget_model("m")
    await deployment.serve("m")
    assert (await client.submit("hi")).model == "m"


async def test_one_of_many_calls_reads_the_cards_again_for_all(
    client: Client, commands: CommandConnection, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was read before is too old; while it is read again, the others go by that."""
    monkeypatch.setattr(model_cards, "FRESH_S", 0.0)
    reads = 0
    read = model_cards.ModelCards.read

    async def counted(self):
        nonlocal reads
        reads += 1
        return await read(self)

    monkeypatch.setattr(model_cards.ModelCards, "read", counted)
    await Deployment(commands, namespace).serve("m")
    await client.submit("hi")
    reads = 0
    await asyncio.gather(*(client.submit("hi") for _ in range(20)))
    assert reads == 1


async def test_the_name_of_a_model_is_resolved(client: Client, deployment: Deployment) -> None:
    await deployment.serve("m")
    assert await client.resolve_model() == "m"
    assert await client.resolve_model("m") == "m"
    with pytest.raises(UnknownModelError):
        await client.resolve_model("other")
