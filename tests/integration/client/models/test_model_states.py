"""The states of models in /v1/models: their engines claim, sleep, start or do not exist."""

from __future__ import annotations

from pathlib import Path

from penstock.producer import Client
from penstock.shared.broker import Broker, EngineCapacity, Homes
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ModelBrokenError
from penstock.shared.swap.views import SleepLevel

from ....adapter_folder import write_adapter
from ...conftest import LONG_MS
from ..harness import CAUSE, serve_gateway


async def test_a_model_has_the_state_of_its_engines_and_devices(
    commands: CommandConnection,
    broker: Broker,
    client: Client,
    deployment: dict[str, str],
    tmp_path: Path,
) -> None:
    homes = Homes(commands, broker.keys)
    await client.register_lora("pets", write_adapter(tmp_path / "pets"))
    async with serve_gateway(**deployment) as http:

        async def read(name: str = "m") -> tuple[str, float | None]:
            model = (await http.get(f"/v1/models/{name}")).json()
            return model["status"]["value"], model["estimated_ready_s"]

        async def listed() -> list[tuple[str, str]]:
            models = (await http.get("/v1/models")).json()["data"]
            return [(model["id"], model["status"]["value"]) for model in models]

        assert await read() == ("unloaded", None)
        # Its first request may start a worker.
        assert await listed() == [("m", "unloaded"), ("pets", "unloaded")]
        broken = ModelBrokenError("m.safetensors is cut off; download it again")
        await homes.renew("gpu0", SleepLevel.DISK, 7.5, error=broken, lease_ttl_ms=LONG_MS)
        assert await read() == ("broken", None)
        assert await listed() == [("m", "broken"), ("pets", "broken")]
        assert (await http.get("/v1/models/m")).json()["error"] == str(broken)
        await homes.renew("gpu0", SleepLevel.DISK, 7.5, lease_ttl_ms=LONG_MS)
        assert await read() == ("unloaded", 7.5)
        await homes.renew("gpu1", SleepLevel.HOST_MEMORY, 1.5, lease_ttl_ms=LONG_MS)
        assert await read() == ("asleep", 1.5)
        assert await read("pets") == ("asleep", 1.5)
        assert (await homes.request_grant("gpu1", 1.5, lease_ttl_ms=LONG_MS)).is_granted
        assert await read() == ("loading", 1.5)
        await broker.claim("e0", EngineCapacity(max_num_seqs=4, num_seqs=0), lease_ttl_ms=LONG_MS)
        assert await read() == ("loaded", 0.0)
        assert await listed() == [("m", "loaded"), ("pets", "loaded")]
        # Both workers leave.
        await broker.reclaim("e0", CAUSE, is_external=True, max_deliveries=3)
        for device in ("gpu0", "gpu1"):
            await homes.leave(device)
        assert await listed() == [("m", "unloaded"), ("pets", "unloaded")]
        assert await read() == ("unloaded", None)
        await client.forget_model("m")
        assert await listed() == []


async def test_an_engine_that_an_operator_put_to_sleep_is_asleep(broker: Broker, deployment: dict[str, str]) -> None:
    await broker.claim("e0", EngineCapacity(max_num_seqs=4, num_seqs=0), lease_ttl_ms=LONG_MS)
    await broker.withdraw("e0")
    async with serve_gateway(**deployment) as http:
        model = (await http.get("/v1/models/m")).json()
    assert (model["status"], model["estimated_ready_s"]) == ({"value": "asleep"}, None)
