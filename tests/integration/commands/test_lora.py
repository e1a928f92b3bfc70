"""``penstock lora`` on a registry, with engines that beat and none that answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.ops import cli as penstock_cli
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.keys import Keys
from penstock.shared.messages.supervision import EngineState
from penstock.shared.params.lora import adapter_digest
from penstock.shared.process.command_line import EXIT_FAILED

from ...adapter_folder import write_adapter

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lora(redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``penstock lora ...`` in this process; returns status, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = penstock_cli.main(["lora", *arguments, "--redis-url", redis_url, "--namespace", namespace])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


async def beat(url: str, namespace: str, engine_id: str, digests: list[str]) -> None:
    """Send one heartbeat, as of an engine that sleeps for ever: it is listed, and asked nothing."""
    connection, keys = CommandConnection(url), Keys(namespace)
    said = EngineHeartbeat(
        worker_id="w",
        engine_id=engine_id,
        model="m",
        state=EngineState.STARTING,
        host="h",
        worker_pid=1,
        core_pid=2,
        lora_digests=digests,
    )
    await connection.execute("SADD", keys.engines(), engine_id)
    await connection.execute("SET", keys.engine(engine_id), msgspec.json.encode(said), "PX", 60_000)
    await connection.close()


def test_a_name_is_added_listed_pinned_and_removed(lora: Run, redis_url: str, namespace: str, tmp_path: Path) -> None:
    cats = write_adapter(tmp_path / "cats")
    digest = adapter_digest(cats)
    status, out, _ = lora("add", "pets", str(cats), "--model", "m", "--tenant", "acme")
    assert status == 0
    assert f"pets of model m is adapter {digest[:12]} for tenant 'acme' (rank 8" in out
    assert "no engine of m is running; each loads it with the first request that uses it" in out
    asyncio.run(beat(redis_url, namespace, "w-0", [digest]))
    assert lora("pin", "pets", "--tenant", "acme")[0] == 0
    header, row = lora("list")[1].splitlines()
    assert header.split()[-4:] == ["LOADED", "BY", "DIGEST", "PATH"]
    assert row.split()[:4] == ["pets", "m", "acme", "8"]
    assert row.split()[-5:] == ["1", "yes", "1", digest[:12], str(cats)]
    (record,) = json.loads(lora("list", "--json", "--model", "m")[1])
    assert (record["digest"], record["target_modules"], record["num_engines"]) == (digest, ["q_proj", "v_proj"], 1)
    assert lora("unpin", "pets", "--tenant", "acme")[0] == 0
    assert not json.loads(lora("list", "--json")[1])[0]["pinned"]
    assert "requests enqueued before keep using it" in lora("remove", "pets", "--tenant", "acme")[1]
    assert lora("list")[1] == "no adapters\n"


def test_moving_a_name_prints_its_previous_adapter(lora: Run, tmp_path: Path) -> None:
    cats, dogs = write_adapter(tmp_path / "cats"), write_adapter(tmp_path / "dogs", b"other")
    lora("add", "pets", str(cats), "--model", "m", "--no-load")
    out = lora("add", "pets", str(dogs), "--model", "m", "--no-load", "--copy-to", str(tmp_path / "all"))[1]
    assert f"it was {adapter_digest(cats)[:12]}; requests enqueued before keep using that one" in out
    assert str(tmp_path / "all" / adapter_digest(dogs)) in out


def test_the_folder_that_hosts_share_may_stand_in_the_environment(
    lora: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ADAPTERS_DIR", str(tmp_path / "all"))
    cats = write_adapter(tmp_path / "cats")
    lora("add", "pets", str(cats), "--model", "m", "--no-load")
    assert json.loads(lora("list", "--json")[1])[0]["path"] == str(tmp_path / "all" / adapter_digest(cats))


def test_errors_are_one_sentence(lora: Run, tmp_path: Path) -> None:
    dora = write_adapter(tmp_path / "dora", use_dora=True)
    for arguments, message in (
        (("add", "pets", str(dora), "--model", "m"), "DoRA is not computed"),
        (("add", "pets", str(tmp_path / "no"), "--model", "m"), "there is no folder"),
        (("add", "pets", str(dora)), "no worker has served a model on this Redis yet"),
        (("remove", "pets"), "everybody's list has no adapter 'pets'"),
        (("pin", "pets", "--tenant", "acme"), "tenant 'acme' has no adapter 'pets'"),
    ):
        status, _, errors = lora(*arguments)
        assert status == EXIT_FAILED
        assert message in errors
