"""A tenant's quotas: requests and tokens per minute, and requests under way at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from penstock.shared.broker import Broker, Claim, EngineCapacity, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import QuotaExceededError
from penstock.shared.keys import ModelKeys
from penstock.shared.queue.policy import OverQuota, QueuePolicy, TenantPolicy

from ..conftest import CAUSE, die, enqueue, finish_with, take

MINUTE_MS = 60_000


async def pass_time(
    commands: CommandConnection, keys: ModelKeys, tenant: str, seconds: int, running: list[str]
) -> None:
    """Let this many seconds pass: what a tenant has used, and until when it is blocked, moves into the past."""
    usage = keys.prefix + f"usage:{tenant}"
    flat = await commands.execute("HGETALL", usage)
    ttl_ms = await commands.execute("PTTL", usage)
    moved: list[str | bytes | int] = []
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        is_second = name[1:].isdigit()
        moved.append(name[:1] + str(int(name[1:]) - seconds).encode() if is_second else name)
        moved.append(int(value) - seconds if name == b"from" else value)
    if moved:
        await commands.execute("DEL", usage)
        if ttl_ms > seconds * 1000:
            await commands.execute("HSET", usage, *moved)
            await commands.execute("PEXPIRE", usage, ttl_ms - seconds * 1000)
    for request_id in running:
        await commands.execute("HINCRBY", keys.request(request_id), "charged_at", -seconds * 1000)
    blocked = keys.prefix + "blocked"
    if await commands.execute("ZSCORE", blocked, tenant):
        await commands.execute("ZINCRBY", blocked, -seconds * 1000, tenant)


@dataclass(frozen=True)
class Start:
    """A request that was started: when, by the history's clock, and what it was charged and has for a prompt."""

    claim: Claim
    at_ms: int
    charged: int
    num_prompt: int


class History:
    """Random requests of one tenant with quotas beside one without, on one engine; time is made to pass."""

    def __init__(self, broker: Broker, commands: CommandConnection, policy: TenantPolicy, seed: int) -> None:
        self.broker, self.commands, self.policy = broker, commands, policy
        self.rng, self.number, self.passed_ms = random.Random(seed), 0, 0
        self.waiting: dict[str, set[str]] = {"limited": set(), "free": set()}
        self.running: dict[str, Start] = {}
        self.started_at_ms: list[int] = []
        self.used: list[tuple[int, int]] = []

    async def now_ms(self) -> int:
        seconds, micros = await self.commands.execute("TIME")
        return int(seconds) * 1000 + int(micros) // 1000 + self.passed_ms

    async def ask(self) -> None:
        for tenant in self.rng.choices(("limited", "free"), k=self.rng.randint(1, 4)):
            self.number += 1
            request_id = f"{tenant}-{self.number}"
            sizes = {"num_prompt_tokens": self.rng.randint(1, 40), "max_tokens": self.rng.randint(1, 60)}
            await enqueue(self.broker, request_id, tenant=tenant, **sizes)
            self.waiting[tenant].add(request_id)

    async def start(self) -> None:
        limit, before_ms = self.rng.randint(1, 4), await self.now_ms()
        wave = await take(self.broker, "e0", limit, num_held=len(self.running))
        for claim in wave:
            tenant = claim.request_id.partition("-")[0]
            self.waiting[tenant].remove(claim.request_id)
            if tenant == "free":
                await finish_with(self.broker, claim, num_output=5)
            else:
                await self.note_start(claim)
        if len(wave) < limit:
            assert not self.waiting["free"]
            is_free_to_start = self.has_room(before_ms, MINUTE_MS + 1000)
            assert not (self.waiting["limited"] and is_free_to_start), "a request waits within its tenant's quotas"

    async def note_start(self, claim: Claim) -> None:
        key = self.broker.keys.request(claim.request_id)
        at_ms, charged, num_prompt = map(
            int, await self.commands.execute("HMGET", key, "charged_at", "charged", "prompt")
        )
        at_ms += self.passed_ms
        assert self.has_room(at_ms, MINUTE_MS), "a request was started beyond its tenant's quotas"
        self.started_at_ms.append(at_ms)
        self.used.append((at_ms, charged))
        self.running[claim.request_id] = Start(claim, at_ms, charged, num_prompt)

    def has_room(self, now_ms: int, window_ms: int) -> bool:
        """Whether one more may start by the quotas, counted over so long; the broker's window is 60 to 61 s."""
        num_requests = sum(at_ms > now_ms - window_ms for at_ms in self.started_at_ms)
        num_tokens = sum(tokens for at_ms, tokens in self.used if at_ms > now_ms - window_ms)
        return (
            len(self.running) < (self.policy.max_concurrent_requests or 10**9)
            and num_requests < (self.policy.requests_per_minute or 10**9)
            and num_tokens < (self.policy.tokens_per_minute or 10**9)
        )

    async def end(self) -> None:
        for request_id in self.rng.sample(sorted(self.running), self.rng.randint(0, len(self.running))):
            start = self.running.pop(request_id)
            num_output = self.rng.randint(0, 60)
            await finish_with(self.broker, start.claim, num_output=num_output)
            extra = start.num_prompt + num_output - start.charged
            self.used.append((await self.now_ms() if extra > 0 else start.at_ms, extra))

    async def wait(self) -> None:
        seconds = self.rng.choice((0, 0, 1, 5, 20, 59, 61))
        await pass_time(self.commands, self.broker.keys, "limited", seconds, list(self.running))
        self.passed_ms += seconds * 1000


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "policy",
    [
        TenantPolicy(requests_per_minute=5),
        TenantPolicy(tokens_per_minute=200),
        TenantPolicy(max_concurrent_requests=3),
        TenantPolicy(requests_per_minute=8, tokens_per_minute=300, max_concurrent_requests=4),
    ],
    ids=["requests", "tokens", "concurrent", "all"],
)
async def test_no_history_goes_beyond_a_quota_or_is_held_up_within_it(
    broker: Broker, queue: Queue, commands, policy: TenantPolicy, seed: int
) -> None:
    """A request starts while its tenant has used less than its quota: the last one alone may go beyond it."""
    await queue.configure_tenant("limited", policy)
    history = History(broker, commands, policy, seed)
    for _ in range(60):
        for step in (history.ask, history.start, history.end, history.wait):
            await step()
    assert len(history.started_at_ms) > 20


async def test_a_request_over_quota_waits_and_the_claim_returns_the_delay(broker: Broker, queue: Queue) -> None:
    await queue.configure_tenant("t", TenantPolicy(requests_per_minute=2))
    await enqueue(broker, "a", "b", "c", tenant="t")
    wave = await broker.claim("e0", EngineCapacity(max_num_seqs=9))
    assert [claim.request_id for claim in wave.claims] == ["a", "b"]
    assert MINUTE_MS / 2 < wave.retry_ms <= MINUTE_MS + 1000
    (tenant,) = (await queue.stats(tenants=True)).tenants
    assert 0 < tenant.blocked_for_s <= wave.retry_ms / 1000 + 0.001
    assert tenant.depth == 1


@pytest.mark.parametrize("end", ["finish", "cancel", "park", "death"])
async def test_the_end_of_a_request_lets_the_next_one_start(broker: Broker, queue: Queue, end: str) -> None:
    await queue.configure_tenant("t", TenantPolicy(max_concurrent_requests=1))
    await enqueue(broker, "a", "b", tenant="t")
    wave = await broker.claim("e0", EngineCapacity(max_num_seqs=9))
    assert ([claim.request_id for claim in wave.claims], wave.retry_ms) == (["a"], -1)
    assert await take(broker, "e1", 9) == []
    (tenant,) = (await queue.stats(tenants=True)).tenants
    assert tenant.blocked_for_s == float("inf")
    if end == "finish":
        await finish_with(broker, wave.claims[0], num_output=1)
    elif end == "cancel":
        await broker.cancel("a")
    elif end == "park":
        assert await broker.park(wave.claims[0], CAUSE, "validation_error", "unreadable")
    else:
        assert await die(broker, "e0", external=False, max_deliveries=1) == (0, 1)
    assert [claim.request_id for claim in await take(broker, "e1", 9)] == ["b"]


async def test_a_released_request_resumes_within_the_concurrency_quota(broker: Broker, queue: Queue) -> None:
    """The request has started: it counts while it waits for its next engine, and no quota delays it."""
    await queue.configure_tenant("t", TenantPolicy(max_concurrent_requests=1, requests_per_minute=1))
    await enqueue(broker, "a", "b", tenant="t")
    (claim,) = await take(broker, "e0", 9)
    await broker.release([("a", claim.epoch)])
    assert [claim.request_id for claim in await take(broker, "e1", 9)] == ["a"]


@pytest.mark.parametrize("of_all", [False, True])
async def test_a_wider_quota_counts_at_once(broker: Broker, queue: Queue, of_all: bool) -> None:
    async def configure(policy: TenantPolicy) -> None:
        if of_all:
            await queue.configure(QueuePolicy(tenant=policy))
        else:
            await queue.configure_tenant("t", policy)

    await configure(TenantPolicy(requests_per_minute=1))
    await enqueue(broker, "a", "b", "c", tenant="t")
    assert len(await take(broker, "e0", 9)) == 1
    assert await take(broker, "e0", 9) == []
    await configure(TenantPolicy(requests_per_minute=2))
    assert len(await take(broker, "e0", 9)) == 1
    await configure(TenantPolicy())
    assert len(await take(broker, "e0", 9)) == 1


async def test_unused_tokens_are_refunded_to_the_quota(broker: Broker, queue: Queue) -> None:
    await queue.configure_tenant("t", TenantPolicy(tokens_per_minute=100))
    await enqueue(broker, "a", "b", tenant="t", num_prompt_tokens=20, max_tokens=80)
    (claim,) = await take(broker, "e0", 9)
    assert await take(broker, "e0", 9) == []
    await finish_with(broker, claim, num_output=3)
    assert [claim.request_id for claim in await take(broker, "e0", 9)] == ["b"]


async def refused(broker: Broker, request_id: str, quota: str) -> float:
    with pytest.raises(QuotaExceededError, match=quota) as caught:
        await enqueue(broker, request_id, tenant="t", num_prompt_tokens=10, max_tokens=10)
    assert caught.value.retryable
    assert await broker.state(request_id) is None
    return caught.value.retry_after_s


async def test_a_policy_may_refuse_instead(broker: Broker, queue: Queue, commands) -> None:
    await queue.configure_tenant("t", TenantPolicy(requests_per_minute=2, over_quota=OverQuota.REFUSE))
    await enqueue(broker, "a", "b", tenant="t")
    # What waits is going to be used.
    assert await refused(broker, "c", r"quota of 2 requests per minute \(requests_per_minute\)") == 60
    await take(broker, "e0", 9)
    assert 58 < await refused(broker, "c", "requests_per_minute") <= 61
    await pass_time(commands, broker.keys, "t", 40, ["a", "b"])
    assert 18 < await refused(broker, "c", "requests_per_minute") <= 21
    await pass_time(commands, broker.keys, "t", 21, ["a", "b"])
    await enqueue(broker, "c", tenant="t")
    await enqueue(broker, "other", tenant="u")


async def test_refusals_for_tokens_and_for_concurrency(broker: Broker, queue: Queue) -> None:
    await queue.configure_tenant("t", TenantPolicy(tokens_per_minute=20, over_quota=OverQuota.REFUSE))
    await enqueue(broker, "a", tenant="t", num_prompt_tokens=10, max_tokens=10)
    (claim,) = await take(broker, "e0", 9)
    assert 58 < await refused(broker, "b", "20 tokens per minute") <= 61
    await queue.configure_tenant("t", TenantPolicy(max_concurrent_requests=1, over_quota=OverQuota.REFUSE))
    assert await refused(broker, "b", "1 concurrent requests") == 1
    await finish_with(broker, claim, num_output=1)
    await enqueue(broker, "b", tenant="t")
    assert 0 < await refused(broker, "c", "max_concurrent_requests") <= 1
