"""The first page: problems, then each model with its queue and engines."""

from __future__ import annotations

from functools import reduce
from typing import Any

from ....producer.control.deployment import unserved_finding
from ....producer.requests.health import LIVE_STATES
from ....producer.webhooks.events import EventState
from ....shared.deployment.records import EngineHeartbeat
from ....shared.messages.supervision import EngineState
from ....shared.queue.stats import QueueStats
from ....shared.stats import Histogram
from ..access import Access
from ..charts import read_charts
from ..page import Page, PageSection, Params, View
from ..servers import missing_processes, read_servers
from ..source import PageSnapshot, together

_BROKEN = (EngineState.DEAD, EngineState.FAILED, EngineState.STALLED)


async def _read_overview(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    models, served, engines = await together(snapshot.models(), snapshot.served_models(), snapshot.engines())
    stats = await together(*map(snapshot.stats, models))
    num_dead = await together(*map(snapshot.num_dead, models))
    rows = []
    problems = await _deployment_problems(snapshot)
    for name, queue, parked in zip(models, stats, num_dead, strict=True):
        own = [engine for engine in engines if engine.model == name]
        rows.append(_model_row(name, queue, parked, own))
        problems += _model_problems(name, queue, parked, own, served)
    return {
        "rows": rows,
        "problems": problems,
        "engines": {name: [engine for engine in engines if engine.model == name] for name in models},
        "facts": {"problems": [problem["text"] for problem in problems]},
        "history": await read_charts(snapshot, list(models), params),
        "now": snapshot.at,
    }


def _model_row(name: str, queue: QueueStats | None, num_dead: int, engines: list[EngineHeartbeat]) -> dict[str, Any]:
    first, between = _merged(engines, "time_to_first_token_s"), _merged(engines, "inter_token_latency_s")
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
        "ttft_p50_s": _at_most(first, 0.5),
        "ttft_p95_s": _at_most(first, 0.95),
        "itl_p50_s": _at_most(between, 0.5),
        "parked": num_dead,
        "engines": len(engines),
    }


def _merged(engines: list[EngineHeartbeat], name: str) -> Histogram | None:
    """Return the merged histogram of all engines; None if no engine has one."""
    histograms = [getattr(engine.stats, name) for engine in engines if engine.stats is not None]
    return reduce(Histogram.merged, histograms) if histograms else None


def _at_most(histogram: Histogram | None, share: float) -> float | None:
    if histogram is None or not histogram.count:
        return None
    value = histogram.quantile(share)
    return value if value != float("inf") else histogram.bounds[-1]


def _model_problems(
    name: str, queue: QueueStats | None, num_dead: int, engines: list[EngineHeartbeat], served: list[str]
) -> list[View]:
    problems = []

    def add(text: str, path: str, level: str = "bad") -> None:
        problems.append({"text": text, "path": path, "level": level, "model": name})

    if queue is None:
        add(f"the Redis that holds {name} does not answer", "/system")
        return problems
    if name not in served and (finding := unserved_finding(queue, engines, served)) is not None:
        add(finding.message, "/queue")
    elif queue.depth and not any(engine.state in LIVE_STATES for engine in engines):
        add(f"{_requests(queue.depth)} of {name} wait, and no engine serves it", "/engines")
    if queue.is_paused:
        add(f"the queue of {name} is paused; {queue.depth} wait", "/queue", "warn")
    for engine in engines:
        if engine.state in _BROKEN:
            add(f"engine {engine.engine_id} is {engine.state}: {engine.error or 'unknown cause'}", "/engines")
    if num_dead:
        add(f"{_requests(num_dead)} of {name} parked", "/dead", "warn")
    return problems


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"


async def _deployment_problems(snapshot: PageSnapshot) -> list[View]:
    source = snapshot.source
    missing, servers, num_dead = await together(
        missing_processes(snapshot), read_servers(snapshot), source.events.count(EventState.DEAD)
    )
    problems = [{"text": finding.message, "path": "/system", "level": "bad", "model": ""} for finding in missing]
    problems += [
        {"text": text, "path": "/system", "level": "bad", "model": ""} for server in servers for text in server.problems
    ]
    if num_dead:
        text = f"{num_dead} webhook events were given up"
        problems.append({"text": text, "path": "/webhooks", "level": "warn", "model": ""})
    return problems


SECTION = PageSection((Page("overview", "/", "Overview", _read_overview, query=("span",), nav="Overview"),))
