"""The gateway where models are on shards: answers, kept responses, figures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from penstock.producer.gateway.app import build_app
from penstock.producer.gateway.settings import GatewaySettings
from penstock.shared.connection import CommandConnection
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.shards import shards_text

from ..client.harness import claim_one, until, write
from .conftest import Connect, Deployment, place, serve


async def test_kept_responses_and_figures(
    deployment: Deployment,
    connect: Connect,
    plain: dict[str, CommandConnection],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.producer.control.deployment.SCRAPE_PATIENCE_S", 0.5)
    for model, name in (("m", "a"), ("n", "b")):
        await place(plain["home"], model, name)
        await serve(plain["home"], model)
    broker = await serve(connect(), "m")
    settings = GatewaySettings(
        redis_url=deployment.url,
        shards=shards_text(deployment.shards),
        files_dir=str(tmp_path / "files"),
        deployment_metrics=True,
    )
    app = await asyncio.to_thread(build_app, settings)  # it reads the version from the disk
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http,
    ):
        made = await http.post("/v1/responses", json={"model": "m", "input": "hi", "background": True})
        assert made.json()["status"] == "queued", made.text
        claim = await claim_one(broker)
        await write(broker, claim, 0, 72, 105, end=FinishReason.STOP)
        found = (await http.get(f"/v1/responses/{made.json()['id']}")).json()
        assert found["status"] == "completed"
        assert found["output"][0]["content"][0]["text"] == "Hi"
        deployment.servers["b"].kill()

        async def are_of_m_alone() -> bool:
            figures = (await http.get("/metrics")).text
            told = [f'penstock_queue_tokens_waiting{{model_name="{model}"}}' in figures for model in "mn"]
            return told == [True, False]

        # One that lives may be slower than the patience, too.
        await until(are_of_m_alone)
