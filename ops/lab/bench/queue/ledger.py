"""Cost of the ledger and of budgets in the scripts, in pairs.

The same requests go through three queues of one Redis, in alternating order, so that a drift of the machine's speed
affects all: with scripts whose ledger and budgets do nothing, with the ledger, and with budgets too. CPU time is the
server's own, its append-only file included.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from .....shared.broker import SCRIPTS, Broker, Entry, FinalRecord, Script
from .....shared.broker.script import PARTS
from .....shared.connection import CommandConnection
from .....shared.deployment.records import ModelCard
from .....shared.keys import Keys
from .....shared.messages.deltas import Delta
from .....shared.messages.outcome import FinishReason, Usage
from .....shared.partitions.budgets import BudgetStore, sync_budgets
from .....shared.queue.budgets import Budget, Period
from .....shared.redis_access.script import script_of
from ....local.stack import private_redis
from .costs import PAYLOAD, RESULT_TTL_MS, claim_all
from .fleet import redis_cpu_s

ROUNDS = 20
NUM_REQUESTS = 512
# As a busy deployment calls, and as one that is not.
AT_ONCE = (64, 1)
SIDES = ("none", "ledger", "budgets")
# What scripts without ledger and budgets lack, besides these two parts.
_REMOVALS = (
    (r"open_ledger\(\)\.(count|write|spend)\([^()]*\)", ""),
    (r", 'budgets'\)$", ")"),
    (r"^ *marks\.budgets = .*\n", ""),
)


class LedgerCost(msgspec.Struct, kw_only=True):
    """CPU microseconds of a request that is enqueued, claimed and ended, in calls of ``at_once``.

    They are the least of all rounds, because other processes only add to them. ``share`` and ``budgets_share`` are the
    shares that the ledger adds, and the ledger with two budgets.
    """

    at_once: int
    us_none: float
    us_ledger: float
    us_budgets: float
    share: float
    budgets_share: float


class LedgerCostRow(msgspec.Struct, kw_only=True):
    costs: list[LedgerCost]


def measure_ledger() -> LedgerCostRow:
    """Measure on a private Redis that writes its file every second."""
    with private_redis(append_only=True) as url:
        return asyncio.run(_measure_ledger(url))


async def _measure_ledger(url: str) -> LedgerCostRow:
    commands = CommandConnection(url)
    took_us: dict[tuple[int, str], list[float]] = {(at_once, side): [] for at_once in AT_ONCE for side in SIDES}
    try:
        await set_budgets(commands)
        for number, at_once in itertools.product(range(ROUNDS + 1), AT_ONCE):
            first = number % len(SIDES)
            for side in (*SIDES[first:], *SIDES[:first]):
                ids = [f"r{number}-{at_once}-{i}" for i in range(NUM_REQUESTS)]
                before_s = await redis_cpu_s(commands)
                await run_requests(commands, side, ids, at_once)
                if number:  # the first one loads the scripts
                    took_us[at_once, side].append(1e6 * (await redis_cpu_s(commands) - before_s) / NUM_REQUESTS)
    finally:
        await commands.close()
    return LedgerCostRow(costs=[_cost(at_once, took_us) for at_once in AT_ONCE])


def _cost(at_once: int, took_us: Mapping[tuple[int, str], list[float]]) -> LedgerCost:
    none, ledger, budgets = (min(took_us[at_once, side]) for side in SIDES)
    return LedgerCost(
        at_once=at_once,
        us_none=none,
        us_ledger=ledger,
        us_budgets=budgets,
        share=ledger / none - 1,
        budgets_share=budgets / none - 1,
    )


@contextmanager
def _scripts_of(side: str) -> Iterator[None]:
    """Run the scripts without their ledger and budgets in this block, if the side is without."""
    scripts = dict(SCRIPTS)
    if side == SIDES[0]:
        SCRIPTS.update({name: _without_ledger(script) for name, script in scripts.items()})
    try:
        yield
    finally:
        SCRIPTS.update(scripts)


def _without_ledger(script: Script) -> Script:
    text = script.text.replace(PARTS["ledger"], "\n").replace(PARTS["budgets"], "\n")
    for pattern, replacement in _REMOVALS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return script_of(script.name, text)


async def set_budgets(commands: CommandConnection) -> None:
    """Set the budgets of the side that has them."""
    keys = Keys("bench-budgets")
    await commands.execute("HSET", keys.models(), "m", msgspec.json.encode(ModelCard(model="m")))
    for period in (Period.DAY, Period.MONTH):
        await BudgetStore(commands, keys).set_budget(Budget(tenant="acme", period=period, limit=2.0**52))
    await sync_budgets(commands, keys)


async def run_requests(commands: CommandConnection, side: str, ids: list[str], at_once: int) -> None:
    """Enqueue, claim and end requests with the scripts of a side."""
    broker = Broker(commands, Keys(f"bench-{side}").model("m"))
    with _scripts_of(side):
        for start in range(0, len(ids), at_once):
            await broker.enqueue_many([_entry(request_id) for request_id in ids[start : start + at_once]])
        claims = await claim_all(broker, len(ids), at_once)
        last = Delta(token_ids=[5], finish_reason=FinishReason.STOP, usage=Usage(100, 1, 40))
        for start in range(0, len(ids), at_once):
            part = claims[start : start + at_once]
            await broker.finish([FinalRecord(claim.request_id, claim.epoch, last) for claim in part])


def _entry(request_id: str) -> Entry:
    return Entry(
        request_id=request_id,
        payload=PAYLOAD,
        result_ttl_ms=RESULT_TTL_MS,
        tenant="acme",
        num_prompt_tokens=100,
        max_tokens=200,
        key_name="web",
    )
