"""``penstock dead`` against parked requests that the test's own broker calls have made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import msgspec
import pytest

from penstock.ops import cli as penstock_cli
from penstock.producer.inputs.prompt import build_request, encode_request
from penstock.shared.broker import Broker, EngineCapacity
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import DeathCause, ModelCard
from penstock.shared.keys import Keys
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.process.command_line import EXIT_FAILED, EXIT_USAGE

CAUSE = DeathCause(engine_id="host-1-0", reason="killed by signal 11\nsecond line", last_step=42, trace="Traceback: x")


async def park(url: str, namespace: str, request_id: str, prompt: str | list[int] = "hello") -> None:
    """Let one engine die on a request, which is enough here; the model is registered as a worker would."""
    connection = CommandConnection(url)
    card = ModelCard(model="m")
    await connection.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(card))
    broker = Broker(connection, Keys(namespace).model("m"))
    params = SamplingParams(max_tokens=7, temperature=0.5)
    request = build_request(prompt, params, card=card, options={"request_id": request_id})
    await broker.enqueue(request_id, encode_request(request), result_ttl_ms=60_000)
    await broker.claim("host-1-0", EngineCapacity(max_num_seqs=1))
    assert await broker.reclaim("host-1-0", CAUSE, is_external=False, max_deliveries=1) == (0, 1)
    await connection.close()


async def write_stranger(url: str, namespace: str) -> None:
    """Put an entry into a lane that is no request, before one; the claim parks it."""
    connection = CommandConnection(url)
    broker = Broker(connection, Keys(namespace).model("m"))
    await connection.execute("XADD", broker.keys.lane("standard", "default"), "*", "who", "knows")
    await broker.enqueue("next", b"payload", result_ttl_ms=60_000)
    (claim,) = (await broker.claim("host-1-0", EngineCapacity(max_num_seqs=2))).claims
    assert claim.request_id == "next"
    await connection.close()


@pytest.fixture
def dead(redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``penstock dead ...`` in this process; returns status, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = penstock_cli.main(["dead", *arguments, "--redis-url", redis_url, "--namespace", namespace])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.mark.parametrize("path", ["", "list", "show", "replay", "purge"])
def test_help(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        penstock_cli.main(["dead", *path.split(), "--help"])
    assert f"usage: penstock dead {path}".strip() in capsys.readouterr().out


def test_list_is_a_table_with_the_first_line_of_the_cause(dead, redis_url, namespace) -> None:
    asyncio.run(park(redis_url, namespace, "a"))
    status, out, _ = dead("list")
    header, row = out.splitlines()
    assert status == 0
    assert header.split() == ["REQUEST", "PARKED", "DELIVERIES", "TOKENS", "ENGINE", "CAUSE"]
    assert row.split(maxsplit=6)[3:] == ["1", "0", "host-1-0", "killed by signal 11"]
    (listed,) = json.loads(dead("list", "--json", "--model", "m")[1])
    assert (listed["request_id"], listed["cause"]["last_step"]) == ("a", 42)
    assert listed["request"]["sampling_params"]["max_tokens"] == 7


def test_show_prints_all_fields(dead, redis_url, namespace) -> None:
    asyncio.run(park(redis_url, namespace, "a", "x" * 1000))
    status, out, _ = dead("show", "a")
    assert status == 0
    for part in (
        "killed by signal 11\nsecond line",
        "engine:     host-1-0",
        "last step:  42",
        "deliveries: 1,",
        "max_tokens=7",
        "temperature=0.5",
        "1000 characters: 'xxx",
        "x…",
        "penstock dead replay a",
        "traceback:\nTraceback: x",
    ):
        assert part in out
    shown = json.loads(dead("show", "a", "--json")[1])
    assert len(shown["input_hash"]) == 64
    assert shown["request"]["prompt"] == "x" * 1000
    asyncio.run(park(redis_url, namespace, "b", list(range(100))))
    assert "100 token ids: 0, 1, 2," in dead("show", "b")[1]


def test_replay_queues_it_again_once(dead, redis_url, namespace) -> None:
    asyncio.run(park(redis_url, namespace, "a"))
    status, out, _ = dead("replay", "a")
    assert (status, "a is queued again" in out) == (0, True)
    assert dead("list")[1] == "nothing is parked\n"
    status, _, err = dead("replay", "a")
    assert status == EXIT_FAILED
    assert "no request 'a' is parked" in err
    assert "penstock dead list" in err

    async def claim() -> list[str]:
        connection = CommandConnection(redis_url)
        wave = await Broker(connection, Keys(namespace).model("m")).claim("host-1-1", EngineCapacity(max_num_seqs=5))
        await connection.close()
        return [claim.request_id for claim in wave.claims]

    assert asyncio.run(claim()) == ["a"]


def test_an_entry_that_is_no_request_can_be_listed_and_purged_but_not_replayed(dead, redis_url, namespace) -> None:
    asyncio.run(park(redis_url, namespace, "a"))
    asyncio.run(write_stranger(redis_url, namespace))
    strange = dead("list")[1].splitlines()[2].split()[0]
    assert "not a request" in dead("list")[1]
    assert "knows" in dead("show", strange)[1]
    assert json.loads(dead("show", strange, "--json")[1])["is_request"] is False
    status, _, err = dead("replay", strange)
    assert (status, "cannot be replayed" in err) == (EXIT_FAILED, True)
    assert dead("purge", strange)[1] == f"{strange} is purged\n"
    assert len(dead("list")[1].splitlines()) == 2


def test_purge_wants_an_id_or_all(dead, redis_url, namespace) -> None:
    for request_id in ("a", "b", "c"):
        asyncio.run(park(redis_url, namespace, request_id))
    assert dead("purge")[0] == EXIT_USAGE
    assert dead("purge", "a", "--all")[0] == EXIT_USAGE
    assert dead("purge", "a")[1] == "a is purged\n"
    assert "no request 'a' is parked" in dead("purge", "a")[2]
    assert dead("purge", "--all")[0] == EXIT_USAGE  # nobody to ask
    assert dead("purge", "--all", "--yes")[1] == "2 purged\n"
    assert dead("list")[1] == "nothing is parked\n"


def test_the_model_must_be_known(dead, redis_url, namespace) -> None:
    assert "no worker has served a model" in dead("list")[2]
    asyncio.run(park(redis_url, namespace, "a"))
    status, _, err = dead("list", "--model", "typo")
    assert (status, "no worker has ever served model 'typo'" in err) == (EXIT_FAILED, True)
