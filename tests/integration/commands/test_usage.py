"""``penstock usage`` against the requests that the test's own broker calls have ended."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock.ops import cli as penstock_cli
from penstock.producer.requests.model_cards import ModelCards
from penstock.shared.broker import Broker, EngineCapacity, FinalRecord
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.process.command_line import EXIT_FAILED

PRICES = """
currency = "EUR"
[models.large]
input = 2.0
cached = 0.5
output = 10.0
[models."*"]
input = 1.0
"""


async def use(connection: CommandConnection, keys: Keys, model: str, tenant: str, key_name: str, adapter: str) -> None:
    """End a request of a thousand prompt tokens, 400 of them cached, and 100 output tokens."""
    broker = Broker(connection, keys.model(model))
    request_id = f"{tenant}-{key_name}-{adapter}"
    await broker.enqueue(request_id, b"p", result_ttl_ms=60_000, tenant=tenant, key_name=key_name, adapter_name=adapter)
    (claim,) = (await broker.claim("host-1-0", EngineCapacity(max_num_seqs=1))).claims
    delta = Delta(token_ids=[1] * 100, finish_reason=FinishReason.STOP, usage=Usage(1000, 100, 400))
    assert await broker.finish([FinalRecord(request_id, claim.epoch, delta)]) == []


async def live(url: str, namespace: str) -> None:
    connection, keys = CommandConnection(url), Keys(namespace)
    for model in ("large", "small"):
        await connection.execute("HSET", keys.models(), model, msgspec.json.encode(ModelCard(model=model)))
    await use(connection, keys, "large", "acme", "web", "")
    await use(connection, keys, "large", "acme", "app", "law")
    await use(connection, keys, "small", "shop", "", "")
    await ModelCards(connection, keys, default=None, wait_for_model=False).forget("small")
    await connection.close()


@pytest.fixture
def usage(redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``penstock usage`` in this process; returns status, output and errors."""
    asyncio.run(live(redis_url, namespace))

    def run(*arguments: str) -> tuple[int, str, str]:
        status = penstock_cli.main(["usage", *arguments, "--redis-url", redis_url, "--namespace", namespace])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_usage_is_grouped_and_priced(usage, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    status, out, _ = usage("--prices", str(prices), "--format", "json")
    assert status == 0
    (acme, shop) = json.loads(out)
    assert (acme["tenant"], acme["finished"], acme["prompt"], acme["cached"], acme["output"]) == (
        "acme",
        2,
        2000,
        800,
        200,
    )
    assert acme["cost"] == pytest.approx((1200 * 2 + 800 * 0.5 + 200 * 10) / 1e6)
    assert shop["cost"] == pytest.approx(1000 / 1e6)  # the price of its cached tokens is that of its input
    total = usage("--prices", str(prices))[1].splitlines()[-1].split()
    assert total == ["total", "3", "3,000", "1,200", "300", "0", "0", "0", "0.0058"]


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("key", [("acme", "app"), ("acme", "web"), ("shop", "")]),
        ("model", [("large", ""), ("small", "")]),
        ("adapter", [("large", ""), ("large", "law"), ("small", "")]),
    ],
)
def test_csv_has_a_row_per_group(usage, by: str, groups: list[tuple[str, str]]) -> None:
    rows = list(csv.DictReader(io.StringIO(usage("--by", by, "--format", "csv")[1])))
    names = {"key": ("tenant", "key"), "model": ("model", "none"), "adapter": ("model", "adapter")}[by]
    assert [tuple(row.get(name, "") for name in names) for row in rows] == groups
    assert sum(int(row["output"]) for row in rows) == 300


@pytest.mark.parametrize("by", ["day", "hour"])
def test_times_add_up_to_the_whole(usage, by: str) -> None:
    rows = json.loads(usage("--by", by, "--format", "json", "--tenant", "acme", "--key", "web")[1])
    assert sum(row["prompt"] for row in rows) == 1000
    assert all(len(row[by]) == {"day": 10, "hour": 13}[by] for row in rows)


def test_only_the_named_time_counts(usage) -> None:
    assert usage("--from", "2020-01-01", "--to", "2020-01-31")[1] == "nothing was used in this time\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--from", "yesterday"), EXIT_FAILED, "from must be a day or an hour of UTC"),
        (("--from", "2020-01-02", "--to", "2020-01-01"), EXIT_FAILED, "to must not be before from"),
        (("--by", "hour", "--from", "2020-01-01"), EXIT_FAILED, "start must be at most 90 days before end"),
        (("--prices", "nowhere.toml"), EXIT_FAILED, "nowhere.toml cannot be read"),
    ],
)
def test_wrong_arguments_are_refused(usage, arguments: tuple[str, ...], status: int, message: str) -> None:
    code, _, errors = usage(*arguments)
    assert (code, message in errors) == (status, True), errors


def test_a_variable_names_the_prices_of_all_commands(usage, monkeypatch, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    monkeypatch.setenv("PENSTOCK_PRICES", str(prices))
    assert "COST EUR" in usage()[1]


def test_an_unknown_field_of_prices_is_named(usage, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("[models.large]\ninputs = 1.0\n")
    assert "inputs" in usage("--prices", str(prices))[2]
