"""Comparison of the ledger with the records of requests: each of the ledger's sums must follow from logs and events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from ....shared.broker import RequestHistory
from ....shared.broker.ledger import HOUR_S, RETAINED_S, Ledger, LedgerSums
from ....shared.connection import CommandConnection
from ....shared.keys import Keys
from ....shared.messages.deltas import Delta
from ....shared.messages.outcome import Usage
from ....shared.queue.lifecycle import EventKind, RequestEvent, RequestState

# Tenant, name of the key, adapter.
Account = tuple[str, str, str]
Books = dict[Account, LedgerSums]
_SCAN_COUNT = 1000
_decode = msgspec.msgpack.Decoder(Delta).decode


class LedgerCheck(msgspec.Struct, kw_only=True):
    """Result of a comparison.

    Args:
        num_requests, num_live: requests that have ended, and that have not, by their records.
        ledger, records: sums over all accounts.
        differences: sentences.
    """

    num_requests: int
    num_live: int
    num_accounts: int
    ledger: LedgerSums
    records: LedgerSums
    differences: list[str]


async def check_ledger(connection: CommandConnection, keys: Keys, model: str, num_partitions: int = 1) -> LedgerCheck:
    """Compare the ledger of a model with the records of its requests, none of which may have expired, or be live."""
    by_records: Books = defaultdict(LedgerSums)
    are_ended: list[bool] = []
    for number in range(num_partitions):
        are_ended += [
            await _count_request(connection, keys, model, number, request_id, by_records)
            for request_id in await _request_ids(connection, keys, model, number)
        ]
    by_ledger = await read_books(connection, keys, model, num_partitions)
    differences = []
    for account in sorted({*by_records, *by_ledger}):
        counted, recorded = by_ledger.get(account, LedgerSums()), by_records.get(account, LedgerSums())
        differences += [
            f"{'/'.join(account)}: {name} is {getattr(counted, name)}, but {getattr(recorded, name)} by the records"
            for name in LedgerSums.__struct_fields__
            if getattr(counted, name) != getattr(recorded, name)
        ]
    return LedgerCheck(
        num_requests=sum(are_ended),
        num_live=len(are_ended) - sum(are_ended),
        num_accounts=len(by_ledger),
        ledger=_total(by_ledger),
        records=_total(by_records),
        differences=differences,
    )


async def read_books(connection: CommandConnection, keys: Keys, model: str, num_partitions: int = 1) -> Books:
    """Return the ledger's sums by account, over all hours; each must be as in the days."""
    ledger = Ledger(connection, [keys.model(model, number) for number in range(num_partitions)])
    end = int((await connection.execute("TIME"))[0]) + 1
    books: list[Books] = []
    for step_s in RETAINED_S:
        sums: Books = defaultdict(LedgerSums)
        for row in await ledger.read(end - RETAINED_S[HOUR_S], end, step_s=step_s):
            sums[row.tenant, row.key_name, row.adapter].accumulate(row.sums)
        books.append(sums)
    if books[0] != books[1]:
        raise AssertionError(f"hours and days of the ledger differ: {books}")
    return books[0]


def joined_checks(checks: Sequence[LedgerCheck]) -> LedgerCheck:
    """Return the checks of several models as one."""
    ledger, records = LedgerSums(), LedgerSums()
    for check in checks:
        ledger.accumulate(check.ledger)
        records.accumulate(check.records)
    return LedgerCheck(
        num_requests=sum(check.num_requests for check in checks),
        num_live=sum(check.num_live for check in checks),
        num_accounts=sum(check.num_accounts for check in checks),
        ledger=ledger,
        records=records,
        differences=[difference for check in checks for difference in check.differences],
    )


def shown_sums(sums: LedgerSums) -> str:
    """Return sums for people, without those that are 0."""
    counts = msgspec.structs.asdict(sums)
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _total(books: Books) -> LedgerSums:
    total = LedgerSums()
    for sums in books.values():
        total.accumulate(sums)
    return total


async def _request_ids(connection: CommandConnection, keys: Keys, model: str, number: int) -> list[str]:
    model_keys = keys.model(model, number)
    prefix = model_keys.request("").encode()
    await connection.execute("EXISTS", model_keys.leases)  # the model may have moved since the last command
    server = connection.link_to(model_keys.leases)
    ids: set[str] = set()
    cursor = b"0"
    while True:
        cursor, names = await server.execute("SCAN", cursor, "MATCH", model_keys.pattern, "COUNT", _SCAN_COUNT)
        ids |= {name[len(prefix) :].decode() for name in names if name.startswith(prefix)}
        if int(cursor) == 0:
            return sorted(ids)


async def _count_request(
    connection: CommandConnection, keys: Keys, model: str, number: int, request_id: str, books: Books
) -> bool:
    """Add the use of a request by its records. Returns False, adding nothing, if it has not ended."""
    model_keys = keys.model(model, number)
    flat = await connection.execute("HGETALL", model_keys.request(request_id))
    fields = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
    state = RequestState(fields["state"].decode())
    if not state.is_end:
        return False
    log = [_decode(record) for record in await connection.execute("LRANGE", model_keys.log(request_id), 0, -1)]
    events = await RequestHistory(connection, model_keys).history(request_id)
    key_name, adapter, *sibling = fields.get("account", b"\n").decode().split("\n")
    num_images = len(fields.get("images", b"").split())
    sums = recorded_sums(state, log, events, num_images=num_images, is_sibling=bool(sibling))
    books[fields["tenant"].decode(), key_name, adapter].accumulate(sums)
    return True


def recorded_sums(
    state: RequestState,
    log: Sequence[Delta],
    events: Sequence[RequestEvent],
    *,
    num_images: int = 0,
    is_sibling: bool = False,
) -> LedgerSums:
    """Return the use of a request, by its log and its events."""
    sums = LedgerSums(**{state.value: 1})
    num_output = max(delta.next_index for delta in log)
    segments = [delta.usage for delta in log if delta.segment_ends and delta.usage is not None]
    if not num_output and state is not RequestState.FINISHED:
        return sums
    sums.output = num_output
    usage = _last_usage(log)
    sums.recomputed = _recomputed(events, log, usage)
    if usage is None or is_sibling:
        return sums
    is_pooled = any(delta.pooled is not None for delta in log)
    setattr(sums, "embedding" if is_pooled else "prompt", usage.num_prompt_tokens)
    first = segments[0] if segments else usage
    sums.cached = min(first.num_cached_tokens, first.num_prompt_tokens)
    sums.images = num_images
    return sums


def _last_usage(log: Sequence[Delta]) -> Usage | None:
    """Return the last count of the prompt that the log has."""
    usages = [usage for delta in log for usage in (delta.prompt_usage, delta.usage) if usage is not None]
    return usages[-1] if usages else None


def _recomputed(events: Sequence[RequestEvent], log: Sequence[Delta], last: Usage | None) -> int:
    """Return the tokens that were known when a new engine claimed the request after the death of another.

    The prompt of a segment is known at its end; that of the last one may not be.
    """
    segments = [delta for delta in log if delta.segment_ends]
    total, has_died = 0, False
    for event in events:
        if event.kind is EventKind.RECLAIMED:
            has_died = True
        elif event.kind is EventKind.CLAIMED and has_died:
            num_output = event.num_output_tokens
            usage = next((delta.usage for delta in segments if delta.next_index > num_output), last)
            total += num_output + (0 if usage is None else usage.num_prompt_tokens)
            has_died = False
    return total
