"""Gain of returning a conversation to the engine that has it cached.

Sessions of several turns and tenants run on two engines of one thread each: alternately with claims that ignore caches
(policy ``warm_ttl_s=None``), and with claims that consider them. Rounds alternate on the same engines, with new
conversations each; ratios are of a round's pair. One load leaves free capacity; the other exceeds the engines, so
that requests wait for a sequence and not for their engine.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import statistics
import string
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from .....producer import Client, SamplingParams
from .....shared.messages.outcome import Usage
from .....shared.queue.policy import QueuePolicy
from ....local.stack import LocalStack
from ....statistics import jain_index, percentile

NUM_ENGINES = 2
NUM_TURNS = 8
NUM_TENANTS = 2
MAX_NUM_SEQS = 8
# Sessions of all tenants: less than half of the engines' capacity, and 1.5 times the capacity.
NUM_SESSIONS = {"room": 6, "full": 24}
# A session ends with some 1,500 tokens. A cache holds eight of 2,048 (``size_kv_cache``): most of an engine's half of
# all sessions. The first turn is long enough to be known (``digests.MIN_BYTES``).
SYSTEM_CHARS = 480
WORDS_CHARS = 100
ANSWER_TOKENS = 16
THINK_S = 0.2
# The byte tokenizer of a random model gives each letter a token, so re-encoding an answer gives the same tokens.
LETTERS = string.ascii_lowercase
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
PLAIN, WARM = QueuePolicy(warm_ttl_s=None), QueuePolicy()


class SessionsSide(msgspec.Struct, kw_only=True):
    """Medians over the rounds of one way to claim. Turns after the first of their session count.

    Args:
        hit_share: of the tokens that an engine had computed for the turn before, prompt and answer, those found.
        jain: Jain's index of the tokens that tenants got until the first of them was done; 1 is fair.
    """

    hit_share: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    jain: float
    wall_s: float


class SessionsLoad(msgspec.Struct, kw_only=True):
    """Results for one number of sessions; ``kept_share`` is the share of warm requests that ran on their engine."""

    name: str
    num_sessions: int
    plain: SessionsSide
    warm: SessionsSide
    ttft_p50_ratio: float
    ttft_p99_ratio: float
    kept_share: float


class SessionsRow(msgspec.Struct, kw_only=True):
    """All loads; ratios are warm over plain."""

    model: str
    num_engines: int
    num_turns: int
    max_num_seqs: int
    rounds: int
    loads: list[SessionsLoad]


class _Turn(msgspec.Struct):
    tenant: str
    number: int
    usage: Usage
    ttft_ms: float
    ended_s: float
    # Tokens of the turn before that may be cached.
    num_findable: int


def measure_sessions(
    name: str, model: Path, scratch: Path, rounds: int, seed: int, *, num_sessions: dict[str, int] | None = None
) -> SessionsRow:
    """Run each load ``rounds`` times in each way, on a model with a byte tokenizer.

    Raises:
        ConfigurationError: the engines did not start.
    """
    folder = scratch / "sessions-model"
    shutil.copytree(model, folder, copy_function=_link, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = ["--device", "cpu", "--threads", "1", "--served-model-name", name, "--log-level", "error"]
    options += ["--max-num-seqs", str(MAX_NUM_SEQS), "--engines", str(NUM_ENGINES)]
    with LocalStack(folder, options) as stack:
        sizes = num_sessions or NUM_SESSIONS
        loads = [asyncio.run(_measure_sessions(stack.url, load, sizes[load], rounds, Random(seed))) for load in sizes]
    return SessionsRow(
        model=name,
        num_engines=NUM_ENGINES,
        num_turns=NUM_TURNS,
        max_num_seqs=MAX_NUM_SEQS,
        rounds=rounds,
        loads=loads,
    )


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(Path(source).resolve())


async def _measure_sessions(url: str, name: str, num_sessions: int, rounds: int, random: Random) -> SessionsLoad:
    async with Client.connect(url) as client:
        token_ids = (await client.tokenize(LETTERS)).token_ids
        sides: dict[str, list[SessionsSide]] = {"plain": [], "warm": []}
        before = await client.queue_stats()
        for _ in range(rounds):
            for side, policy in (("plain", PLAIN), ("warm", WARM)):
                await client.configure_queue(policy)
                sides[side].append(_side(*await _run_sessions(client, num_sessions, token_ids, random)))
        after = await client.queue_stats()
    plain, warm = sides["plain"], sides["warm"]
    return SessionsLoad(
        name=name,
        num_sessions=num_sessions,
        plain=_median(plain),
        warm=_median(warm),
        ttft_p50_ratio=statistics.median(b.ttft_p50_ms / a.ttft_p50_ms for a, b in zip(plain, warm, strict=True)),
        ttft_p99_ratio=statistics.median(b.ttft_p99_ms / a.ttft_p99_ms for a, b in zip(plain, warm, strict=True)),
        kept_share=(after.num_warm_kept - before.num_warm_kept) / max(1, after.num_warm - before.num_warm),
    )


async def _run_sessions(
    client: Client, num_sessions: int, token_ids: list[int], random: Random
) -> tuple[list[_Turn], float]:
    """Run all sessions concurrently, and return their turns and the total seconds."""
    started = time.perf_counter()
    params = SamplingParams(temperature=1.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, allowed_token_ids=token_ids)
    each = [
        _session(client, f"tenant-{number % NUM_TENANTS}", params, Random(random.random()), started)
        for number in range(num_sessions)
    ]
    turns = [turn for session in await asyncio.gather(*each) for turn in session]
    return turns, time.perf_counter() - started


async def _session(client: Client, tenant: str, params: SamplingParams, random: Random, started: float) -> list[_Turn]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "".join(random.choices(LETTERS, k=SYSTEM_CHARS))}]
    turns: list[_Turn] = []
    num_findable = 0
    for number in range(NUM_TURNS):
        await asyncio.sleep(THINK_S * random.random())
        messages.append({"role": "user", "content": "".join(random.choices(LETTERS, k=WORDS_CHARS))})
        sent_s = time.perf_counter()
        ttft_ms, usage, text = math.nan, Usage(), ""
        async for delta in client.stream(messages, params, tenant=tenant):
            if math.isnan(ttft_ms) and delta.token_ids:
                ttft_ms = 1000 * (time.perf_counter() - sent_s)
            text += delta.text
            usage = delta.usage or usage
        messages.append({"role": "assistant", "content": text})
        turns.append(_Turn(tenant, number, usage, ttft_ms, time.perf_counter() - started, num_findable))
        num_findable = usage.num_prompt_tokens + usage.num_output_tokens
    return turns


def _side(turns: list[_Turn], wall_s: float) -> SessionsSide:
    later = [turn for turn in turns if turn.number > 0]
    return SessionsSide(
        hit_share=sum(turn.usage.num_cached_tokens for turn in later) / sum(turn.num_findable for turn in later),
        ttft_p50_ms=percentile([turn.ttft_ms for turn in later], 0.5),
        ttft_p99_ms=percentile([turn.ttft_ms for turn in later], 0.99),
        jain=_jain(turns),
        wall_s=wall_s,
    )


def _jain(turns: list[_Turn]) -> float:
    """Return Jain's index of the tenants' tokens until the first tenant was done, with equal demand."""
    ends: dict[str, float] = defaultdict(float)
    for turn in turns:
        ends[turn.tenant] = max(ends[turn.tenant], turn.ended_s)
    tokens = dict.fromkeys(ends, 0)
    for turn in turns:
        if turn.ended_s <= min(ends.values()):
            tokens[turn.tenant] += turn.usage.num_prompt_tokens + turn.usage.num_output_tokens
    return jain_index([*tokens.values()])


def _median(sides: list[SessionsSide]) -> SessionsSide:
    names = SessionsSide.__struct_fields__
    return SessionsSide(**{name: statistics.median(getattr(side, name) for side in sides) for name in names})
