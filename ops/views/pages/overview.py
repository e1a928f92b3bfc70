"""The first page: what is wrong, then each model with its queue and engines."""

from __future__ import annotations

from functools import reduce
from typing import Any

from ....producer.control.deployment import unserved_finding
from ....producer.requests.health import LIVE_STATES
from ....producer.webhooks.events import EventState
from ....shared.deployment.records import EngineHeartbeat
from ....shared.messages.worker_status import EngineState
from ....shared.queue.stats import QueueStats
from ....shared.stats.engine import Histogram
from ..access import Access
from ..charts import read_charts
from ..page import Page, Params, Room, View
from ..processes import what_is_missing
from ..servers import read_servers
from ..source import Moment, together

_BROKEN = (EngineState.DEAD, EngineState.FAILED, EngineState.STALLED)


async def _read(moment: Moment, params: Params, _: Access) -> View:
    models, served, engines = await together(moment.models(), moment.served_models(), moment.engines())
    stats = await together(*map(moment.stats, models))
    num_dead = await together(*map(moment.num_dead, models))
    rows = []
    problems = await _of_deployment(moment)
    for name, queue, parked in zip(models, stats, num_dead, strict=True):
        own = [engine for engine in engines if engine.model == name]
        rows.append(_row(name, queue, parked, own))
        problems += _of_model(name, queue, parked, own, served)
    return {
        "rows": rows,
        "problems": problems,
        "engines": {name: [one for one in engines if one.model == name] for name in models},
        "facts": {"problems": [problem["text"] for problem in problems]},
        "history": await read_charts(moment, list(models), params),
        "now": moment.at,
    }


def _row(name: str, queue: QueueStats | None, num_dead: int, engines: list[EngineHeartbeat]) -> dict[str, Any]:
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
    """One histogram of all engines; None where none has counted."""
    found = [getattr(engine.stats, name) for engine in engines if engine.stats is not None]
    return reduce(Histogram.merged, found) if found else None


def _at_most(histogram: Histogram | None, share: float) -> float | None:
    if histogram is None or not histogram.count:
        return None
    value = histogram.quantile(share)
    return value if value != float("inf") else histogram.bounds[-1]


def _of_model(
    name: str, queue: QueueStats | None, num_dead: int, engines: list[EngineHeartbeat], served: list[str]
) -> list[View]:
    problems = []

    def say(text: str, path: str, level: str = "bad") -> None:
        problems.append({"text": text, "path": path, "level": level, "model": name})

    if queue is None:
        say(f"the Redis that holds {name} does not answer", "/system")
        return problems
    if name not in served and (finding := unserved_finding(queue, engines, served)) is not None:
        say(finding.message, "/queue")
    elif queue.depth and not any(engine.state in LIVE_STATES for engine in engines):
        say(f"{_requests(queue.depth)} of {name} wait, and no engine serves it", "/engines")
    if queue.is_paused:
        say(f"the queue of {name} is paused; {queue.depth} wait", "/queue", "warn")
    for engine in engines:
        if engine.state in _BROKEN:
            say(f"engine {engine.engine_id} is {engine.state}: {engine.error or 'no cause is known'}", "/engines")
    if num_dead:
        say(f"{_requests(num_dead)} of {name} parked", "/dead", "warn")
    return problems


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"


async def _of_deployment(moment: Moment) -> list[View]:
    source = moment.source
    missing, servers, num_dead = await together(
        what_is_missing(moment), read_servers(moment), source.events.count(EventState.DEAD)
    )
    found = [{"text": finding.message, "path": "/system", "level": "bad", "model": ""} for finding in missing]
    found += [
        {"text": text, "path": "/system", "level": "bad", "model": ""} for server in servers for text in server.problems
    ]
    if num_dead:
        text = f"{num_dead} webhook events were given up"
        found.append({"text": text, "path": "/webhooks", "level": "warn", "model": ""})
    return found


ROOM = Room((Page("overview", "/", "Overview", _read, query=("span",), nav="Overview"),))
