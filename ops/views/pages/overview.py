"""The first page: problems, then each model with its queue and engines."""

from __future__ import annotations

import asyncio
from typing import Any

from ....producer.control.deployment import unserved_finding
from ....producer.requests.health import LIVE_STATES
from ....producer.webhooks.events import EventState
from ....shared.broker.series import SeriesPoint, sum_of_steps
from ....shared.deployment.records import EngineHeartbeat
from ....shared.errors import RedisUnavailableError
from ....shared.messages.supervision import EngineState
from ....shared.partitions import read_series
from ....shared.queue.stats import QueueStats
from ...words import requests_in_words
from ..access import Access
from ..charts import CACHED_S, CHART_QUERY, quantile_of, read_charts
from ..page import Page, PageSection, Params, View, problem_of
from ..servers import missing_processes, read_servers
from ..source import PATIENCE_S, PageSnapshot, together

# Latencies are those of this time, so that a bad minute is visible, and later gone.
RECENT_MIN = 5
_LATENCIES = (
    ("ttft_p50_s", "time_to_first_token_s", 0.5),
    ("ttft_p99_s", "time_to_first_token_s", 0.99),
    ("itl_p50_s", "inter_token_latency_s", 0.5),
    ("itl_p99_s", "inter_token_latency_s", 0.99),
)
_BROKEN = (EngineState.DEAD, EngineState.FAILED, EngineState.STALLED)


async def _read_overview(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    models, served, engines = await together(snapshot.models(), snapshot.served_models(), snapshot.engines())
    stats = await together(*map(snapshot.stats, models))
    num_dead = await together(*map(snapshot.num_dead, models))
    recent = await together(*(_last_minutes(snapshot, model) for model in models))
    rows = []
    problems = await _deployment_problems(snapshot)
    for name, queue, parked, point in zip(models, stats, num_dead, recent, strict=True):
        own = [engine for engine in engines if engine.model == name]
        rows.append(_model_row(name, queue, parked, own, point))
        problems += _model_problems(name, queue, parked, own, served)
    return {
        "rows": rows,
        "problems": problems,
        "engines": {name: [engine for engine in engines if engine.model == name] for name in models},
        "facts": {"problems": [problem["text"] for problem in problems]},
        "history": await read_charts(snapshot, list(models), params),
        "now": snapshot.at,
    }


def _model_row(
    name: str, queue: QueueStats | None, num_dead: int, engines: list[EngineHeartbeat], recent: SeriesPoint | None
) -> dict[str, Any]:
    latencies = {column: recent and quantile_of(recent, histogram, share) for column, histogram, share in _LATENCIES}
    return {
        "model": name,
        "state": "away" if queue is None else "paused" if queue.is_paused else "open",
        "waiting": queue and queue.depth,
        "waiting_tokens": queue and queue.num_tokens,
        "estimated_wait_s": queue and queue.estimated_wait_s,
        "oldest_age_s": queue and queue.oldest_age_s,
        "running": queue and queue.num_running,
        "requests_per_s": queue and queue.requests_per_s,
        "tokens_per_s": sum(engine.tokens_per_s for engine in engines),
        **latencies,
        "parked": num_dead,
        "engines": len(engines),
    }


async def _last_minutes(snapshot: PageSnapshot, model: str) -> SeriesPoint | None:
    """Return the counts of the last minutes as one step; None if the model's Redis is unreachable."""
    source = snapshot.source

    async def read_minutes() -> SeriesPoint | None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                points = await read_series(source.connection, source.keys, model, hours=RECENT_MIN / 60, step_s=60)
        except (TimeoutError, RedisUnavailableError):
            return None
        return sum_of_steps(points)

    return await source.cached(("last minutes", model), CACHED_S, read_minutes)


def _model_problems(
    name: str, queue: QueueStats | None, num_dead: int, engines: list[EngineHeartbeat], served: list[str]
) -> list[View]:
    problems = []

    def add(text: str, path: str, code: str, level: str = "bad") -> None:
        problems.append(problem_of(text, path, code, level=level, model=name))

    if queue is None:
        add(f"the Redis that holds {name} does not answer", "/system", "model_away")
        return problems
    if name not in served and (finding := unserved_finding(queue, engines, served)) is not None:
        add(finding.message, "/queue", finding.code)
    elif queue.depth and not any(engine.state in LIVE_STATES for engine in engines):
        add(f"{requests_in_words(queue.depth)} of {name} wait, and no engine serves it", "/engines", "no_engine")
    if queue.is_paused:
        add(f"the queue of {name} is paused; {queue.depth} wait", "/queue", "paused", "warn")
    for engine in engines:
        if engine.state in _BROKEN:
            text = f"engine {engine.engine_id} is {engine.state}: {engine.error or 'unknown cause'}"
            add(text, "/engines", "engine_broken")
    if num_dead:
        add(f"{requests_in_words(num_dead)} of {name} parked", "/dead", "parked", "warn")
    return problems


async def _deployment_problems(snapshot: PageSnapshot) -> list[View]:
    source = snapshot.source
    missing, servers, num_dead = await together(
        missing_processes(snapshot), read_servers(snapshot), source.events.count(EventState.DEAD)
    )
    problems = [problem_of(finding.message, "/system", finding.code) for finding in missing]
    problems += [problem_of(str(risk), "/system", risk.code) for server in servers for risk in server.risks]
    if num_dead:
        text = f"{num_dead} webhook events were given up"
        problems.append(problem_of(text, "/webhooks", "webhooks_given_up", level="warn"))
    return problems


SECTION = PageSection((Page("overview", "/", "Overview", _read_overview, query=CHART_QUERY, nav="Overview"),))
