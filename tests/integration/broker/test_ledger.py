"""The ledger against the records of requests: every kind of end, after deaths, retries and damage."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.ops.lab.chaos.ledger_records import check_ledger, read_books
from penstock.shared.broker import Broker, Claim, DeadLetter, FinalRecord, Record, SegmentRecord
from penstock.shared.broker.ledger import DAY_S, HOUR_S, Ledger, LedgerSums
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta, SegmentEnd
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.messages.requests import InputChunk
from penstock.shared.params.images import ImageInput
from penstock.shared.params.pooling import Pooled

from .conftest import CAUSE, change_script, die, enqueue, take

NO_KEY = ("acme", "", "")


async def begin(broker: Broker, request_id: str, *, cached: int = 0, num: int = 1, **options: Any) -> Claim:
    """Enqueue, claim, and log the first tokens of a prompt of ten."""
    await enqueue(broker, request_id, tenant="acme", num_prompt_tokens=7, max_tokens=9, **options)
    (claim,) = await take(broker, "e0", 1)
    delta = Delta(index=0, token_ids=list(range(num)), text="x" * num, prompt_usage=Usage(10, 0, cached))
    assert await broker.append([Record(request_id, claim.epoch, delta)]) == []
    return claim


def end(claim: Claim, index: int, reason: FinishReason = FinishReason.STOP, *, cached: int = 0) -> FinalRecord:
    usage = Usage(10, index + 1, cached)
    return FinalRecord(
        claim.request_id, claim.epoch, Delta(index=index, token_ids=[5], finish_reason=reason, usage=usage)
    )


async def checked(commands: CommandConnection, broker: Broker) -> dict[tuple[str, str, str], LedgerSums]:
    """Return the ledger, which equals the records."""
    keys = Keys(broker.keys.prefix.partition(":")[0])
    check = await check_ledger(commands, keys, "m")
    assert check.differences == []
    return dict(await read_books(commands, keys, "m"))


async def test_each_account_has_its_tokens_once_although_calls_are_repeated(broker: Broker, commands) -> None:
    claim = await begin(broker, "a", cached=4, key_name="web app", adapter_name="law")
    for _ in range(2):
        assert await broker.finish([end(claim, 1, cached=4)]) == []
    plain = await begin(broker, "b")
    assert await broker.finish([end(plain, 1)]) == []
    assert await checked(commands, broker) == {
        ("acme", "web app", "law"): LedgerSums(finished=1, prompt=10, cached=4, output=2),
        NO_KEY: LedgerSums(finished=1, prompt=10, output=2),
    }


async def test_every_end_is_counted_with_what_was_delivered(broker: Broker, commands) -> None:
    await enqueue(broker, "never run", tenant="acme")
    await broker.cancel("never run")
    await begin(broker, "cancelled", cached=3, num=2)
    await broker.cancel("cancelled")
    claim = await begin(broker, "failed")
    await broker.finish([end(claim, 1, FinishReason.ERROR)])
    claim = await begin(broker, "parked", num=3)
    assert await broker.park(claim, CAUSE, "poison_request", "it kills engines")
    await begin(broker, "expired", timeout_ms=600_000)
    await commands.execute("ZADD", broker.keys.prefix + "deadlines", 1, "expired")
    assert await broker.expire(grace_ms=0) == 1
    assert await checked(commands, broker) == {
        NO_KEY: LedgerSums(cancelled=2, failed=1, parked=1, expired=1, prompt=40, cached=3, output=8)
    }


async def test_an_engine_that_ends_before_the_first_token_bills_nothing(broker: Broker, commands) -> None:
    await enqueue(broker, "a", tenant="acme")
    (claim,) = await take(broker, "e0", 1)
    delta = Delta(finish_reason=FinishReason.EXPIRED, usage=Usage(10))
    assert await broker.finish([FinalRecord("a", claim.epoch, delta)]) == []
    assert await checked(commands, broker) == {NO_KEY: LedgerSums(expired=1)}


async def test_tokens_computed_again_after_deaths_are_told_apart(broker: Broker, commands) -> None:
    claim = await begin(broker, "a", num=2)
    for engine, index in (("e0", 2), ("e1", 3)):
        assert await die(broker, engine, external=True) == (1, 0)
        (claim,) = await take(broker, f"e{index - 1}", 1)
        assert await broker.append([Record("a", claim.epoch, Delta(index=index, token_ids=[1]))]) == []
    assert await broker.release([("a", claim.epoch)]) == 1  # no death
    (claim,) = await take(broker, "e9", 1)
    assert await broker.finish([end(claim, 4, cached=2)]) == []
    recomputed = (10 + 2) + (10 + 3)
    assert await checked(commands, broker) == {
        NO_KEY: LedgerSums(finished=1, prompt=10, cached=2, output=5, recomputed=recomputed)
    }


async def test_a_shared_prompt_and_its_images_count_once(broker: Broker, commands) -> None:
    for name, is_sibling in (("a", False), ("a~1", True)):
        claim = await begin(broker, name, images=(ImageInput.from_bytes(b"one"),), is_sibling=is_sibling)
        assert await broker.finish([end(claim, 1)]) == []
    assert await checked(commands, broker) == {NO_KEY: LedgerSums(finished=2, prompt=10, output=4, images=1)}


async def test_pooled_prompts_are_embedding_tokens(broker: Broker, commands) -> None:
    await enqueue(broker, "a", tenant="acme")
    (claim,) = await take(broker, "e0", 1)
    delta = Delta(pooled=Pooled(shape=(1,), data=b"\0\0\0\0"), finish_reason=FinishReason.STOP, usage=Usage(6, 0, 2))
    assert await broker.finish([FinalRecord("a", claim.epoch, delta)]) == []
    assert await checked(commands, broker) == {NO_KEY: LedgerSums(finished=1, embedding=6, cached=2)}


def segment(claim: Claim, number: int, index: int, num_prompt: int, *, cached: int = 0) -> SegmentRecord:
    ends = [SegmentEnd(number, index + 1, FinishReason.LENGTH)]
    delta = Delta(index=index, token_ids=[1], segment_ends=ends, usage=Usage(num_prompt, index + 1, cached))
    return SegmentRecord(claim.request_id, claim.epoch, delta)


@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_conversation_counts_at_each_segment_and_once(broker: Broker, commands, is_closed: bool) -> None:
    claim = await begin(broker, "a", cached=4, is_resumable=True)
    assert await broker.end_segments([segment(claim, 0, 1, 10, cached=4)]) == []
    first = LedgerSums(prompt=10, cached=4, output=2)
    assert dict(await read_books(commands, Keys(broker.keys.prefix.partition(":")[0]), "m")) == {NO_KEY: first}
    await broker.input.extend("a", 1, InputChunk(prompt="b"))
    (claim,) = await take(broker, "e1", 1)
    assert await broker.append([Record("a", claim.epoch, Delta(index=2, token_ids=[3]))]) == []
    if is_closed:
        await broker.input.close("a")
        assert await broker.end_segments([segment(claim, 1, 3, 25, cached=12)]) == []
        second = LedgerSums(finished=1, prompt=25, cached=4, output=4)
    else:
        await broker.cancel("a")
        second = LedgerSums(cancelled=1, prompt=10, cached=4, output=3)
    assert await checked(commands, broker) == {NO_KEY: second}


async def test_a_replayed_request_keeps_its_account(broker: Broker, commands) -> None:
    claim = await begin(broker, "a", key_name="web")
    assert await broker.park(claim, CAUSE, "poison_request", "it kills engines")
    assert await DeadLetter(commands, broker.keys).replay("a")
    (claim,) = await take(broker, "e0", 1)
    assert await broker.finish([end(claim, 0)]) == []
    books = await read_books(commands, Keys(broker.keys.prefix.partition(":")[0]), "m")
    assert books["acme", "web", ""] == LedgerSums(finished=1, parked=1, prompt=20, output=2)


async def test_an_end_that_stops_half_way_counts(broker: Broker, commands) -> None:
    """A foreign value stops the script after the end was written; the repaired call does not count it again."""
    await begin(broker, "a", num=2)
    await commands.execute("HSET", broker.keys.prefix + "queue", "num_started", "many")
    assert await broker.cancel("a") == "cancelled"
    assert await checked(commands, broker) == {NO_KEY: LedgerSums(cancelled=1, prompt=10, output=2)}


@pytest.mark.parametrize("is_whole_key", [True, False])
async def test_foreign_data_in_the_ledger_stops_no_end(broker: Broker, commands, is_whole_key: bool) -> None:
    now = int((await commands.execute("TIME"))[0])
    keys = [broker.keys.ledger(step_s, at - at % step_s) for step_s in (HOUR_S, DAY_S) for at in (now, now + step_s)]
    for key in (*keys, broker.keys.prefix + "ledger:rows"):
        if is_whole_key:
            await commands.execute("SET", key, "foreign")
        else:
            await commands.execute(*(("RPUSH", key) if key.endswith("rows") else ("HSET", key, "acme\n\n")), "foreign")
    claim = await begin(broker, "a")
    assert await broker.finish([end(claim, 1)]) == []
    assert await checked(commands, broker) == {NO_KEY: LedgerSums(finished=1, prompt=10, output=2)}


async def test_an_hour_that_has_passed_keeps_its_sums(broker: Broker, commands) -> None:
    """An end counts in the hour in which it was, however late its row is read, or if the clock went back."""
    rows = broker.keys.prefix + "ledger:rows"
    for hours in (5, 30, -3):
        claim = await begin(broker, f"r{hours}")
        assert await broker.finish([end(claim, 1)]) == []
        used, at, *rest = (await commands.execute("LINDEX", rows, -1)).split(b"\n")
        await commands.execute("LSET", rows, -1, b"\n".join([used, b"%d" % (int(at) - hours * HOUR_S), *rest]))
    claim = await begin(broker, "last")
    assert await broker.finish([end(claim, 1)]) == []
    keys = Keys(broker.keys.prefix.partition(":")[0])
    now = int((await commands.execute("TIME"))[0])
    for step_s in (HOUR_S, DAY_S):
        rows = await Ledger(commands, [keys.model("m")]).read(now - 2 * DAY_S, now + DAY_S, step_s=step_s)
        assert sum(row.sums.output for row in rows) == 8
        assert len(rows) == {HOUR_S: 4, DAY_S: len({row.at for row in rows})}[step_s]


async def test_the_hashes_expire_after_their_time(broker: Broker, commands) -> None:
    claim = await begin(broker, "a")
    assert await broker.finish([end(claim, 1)]) == []
    await checked(commands, broker)
    for step_s, retained_s in ((HOUR_S, 90 * DAY_S), (DAY_S, 3 * 366 * DAY_S)):
        (name,) = await commands.execute("KEYS", broker.keys.ledger(step_s, 0).removesuffix("0") + "*")
        assert abs(await commands.execute("TTL", name) - retained_s) <= step_s


async def test_too_many_accounts_share_a_field(broker: Broker, commands, monkeypatch) -> None:
    """Beyond the first limit tenants keep their sums; beyond the second only the total is known."""
    change_script(
        monkeypatch, "read_ledger", "MAX_ACCOUNTS, MAX_TENANTS = 10000, 100000", "MAX_ACCOUNTS, MAX_TENANTS = 2, 3"
    )
    keys, books = Keys(broker.keys.prefix.partition(":")[0]), {}
    for number in range(6):
        tenant = "acme" if number < 4 else f"t{number}"
        await enqueue(broker, f"r{number}", tenant=tenant, key_name=f"k{number}")
        (claim,) = await take(broker, "e0", 1)
        assert await broker.finish([end(claim, 0)]) == []
        books = await read_books(commands, keys, "m")
    assert {account: sums.output for account, sums in books.items()} == {
        ("acme", "k0", ""): 1,
        ("acme", "k1", ""): 1,
        ("acme", "*", "*"): 2,
        ("*", "*", "*"): 2,
    }
