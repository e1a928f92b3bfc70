"""``penstock shard``, and the other commands where there are shards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.ops.cli import main
from penstock.ops.cli.queues import show as queue_show
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ConfigurationError
from penstock.shared.keys import Keys
from penstock.shared.shards import make_servers, parse_shards, shards_text

from .conftest import Deployment, place, serve

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``penstock`` in this process; returns status, output and errors."""

    def run(*arguments: str, shards: str = shards_text(deployment.shards)) -> tuple[int, str, str]:
        status = main([*arguments, "--redis-url", deployment.url, "--shards", shards])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def served(deployment: Deployment) -> None:
    """Model "m" on shard "a", where a request waits."""

    async def fill(servers: dict[str, CommandConnection]) -> None:
        await place(servers["home"], "m", "a")
        await serve(servers["home"], "m")
        await Broker(servers["a"], Keys().model("m")).enqueue("r", b"payload", result_ttl_ms=60_000)
        for server in servers.values():
            await server.close()

    asyncio.run(_with(deployment, fill))


async def _with(deployment: Deployment, work: Callable[[dict[str, CommandConnection]], Any]) -> None:
    await work(make_servers(deployment.url, deployment.shards))


def test_list_and_move(run: Run, served: None) -> None:
    status, out, _ = run("shard", "list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["SHARD", "home", "a", "b"]
    assert [line.split()[-1] for line in out.splitlines()] == ["MODELS", "-", "m", "-"]
    status, out, _ = run("shard", "move", "m", "b")
    assert status == 0
    assert out.startswith("model m has moved from a to b: ")
    rows = {row["name"]: row for row in json.loads(run("shard", "list", "--json")[1])}
    assert {name: row["models"] for name, row in rows.items()} == {"home": [], "a": [], "b": ["m"]}
    assert all(row["memory"] > 0 and row["version"] for row in rows.values())
    # The other commands find it there.
    sheet = run("queue", "show", "m")[1]
    assert "waiting: 1" in sheet.replace("  ", " ").replace("  ", " ")
    assert json.loads(run("queue", "list", "--json")[1])[0]["depth"] == 1


def test_an_unreachable_shard_is_reported(run: Run, served: None, deployment: Deployment) -> None:
    deployment.servers["b"].kill()
    status, out, _ = run("shard", "list")
    assert status == 0
    assert "away" in out.splitlines()[-1]


def test_queues_of_living_shards_are_listed(
    run: Run, served: None, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_show, "PATIENCE_S", 0.5)

    async def add(servers: dict[str, CommandConnection]) -> None:
        await place(servers["home"], "n", "b")
        await serve(servers["home"], "n")
        for server in servers.values():
            await server.close()

    asyncio.run(_with(deployment, add))
    deployment.servers["a"].kill()
    status, out, errors = run("queue", "list")
    assert status == 1
    assert [line.split()[0] for line in out.splitlines()] == ["MODEL", "n"]
    assert "the Redis that holds m does not answer" in errors


def test_an_unconfigured_shard_is_reported(run: Run, served: None, deployment: Deployment) -> None:
    only_b = f"b={deployment.shards['b']}"
    status, out, _ = run("shard", "list", shards=only_b)
    assert status == 0
    assert out.splitlines()[-1].split()[0] == "a"
    assert "not in PENSTOCK_SHARDS" in out.splitlines()[-1]
    status, _, errors = run("shard", "move", "m", "b", shards=only_b)
    assert status == 1
    assert "shard 'a', which is not among home, b" in errors
    status, _, errors = run("queue", "show", "m", shards=only_b)
    assert status == 1
    assert "model 'm' lives on shard 'a'" in errors


def test_wrong_arguments_are_refused(run: Run, served: None) -> None:
    assert run("shard", "move", "m", "c")[0] == 1
    status, _, errors = run("shard", "move", "m", "home", shards="")
    assert status == 2
    assert "no shards are configured" in errors


@pytest.mark.parametrize(
    ("text", "shards"),
    [
        ("", {}),
        ("redis://h:1", {"h:1": "redis://h:1"}),
        ("redis://:secret@h:1/3?protocol=2", {"h:1/3": "redis://:secret@h:1/3?protocol=2"}),
        ("a=redis://h:1, b=rediss://h:2", {"a": "redis://h:1", "b": "rediss://h:2"}),
        (
            "a=redis+sentinel://s1,s2:3,s3/n,unix:///tmp/x.sock",
            {"a": "redis+sentinel://s1,s2:3,s3/n", "tmp/x.sock": "unix:///tmp/x.sock"},
        ),
    ],
)
def test_shards_are_read(text: str, shards: dict[str, str]) -> None:
    assert parse_shards(text) == shards
    assert parse_shards(shards_text(shards)) == shards


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("home=redis://h:1", "'home' cannot be a shard's name"),
        ("a=redis://h:1,a=redis://h:2", "the name 'a' is given twice"),
        ("a=http://h:1", "must begin with redis://"),
        ("just words", "must begin with redis://"),
    ],
)
def test_shards_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_shards(text)
