"""Processes as far as they tell of themselves, and the Redis servers."""

from __future__ import annotations

from typing import Any

from ....shared.records import EngineHeartbeat
from ..access import Access
from ..page import Page, Params, Room, View
from ..servers import read_servers
from ..source import Moment, together


async def _read(moment: Moment, _: Params, __: Access) -> View:
    source = moment.source
    servers, engines, jobs = await together(
        read_servers(moment),
        moment.engines(),
        source.connection.execute("GET", source.keys.jobs_health()),
    )
    processes = _workers(engines)
    if jobs:
        processes.append({"kind": "jobs", "id": "penstock jobs", "host": "", "tells": jobs.decode(errors="replace")})
    return {
        "rows": [server.row for server in servers],
        "problems": [text for server in servers for text in server.problems],
        "processes": processes,
        "has_jobs": bool(jobs),
        "facts": {"processes": processes},
    }


def _workers(engines: list[EngineHeartbeat]) -> list[dict[str, Any]]:
    """A line for each `worker start`, by what its engines say."""
    found: dict[str, list[EngineHeartbeat]] = {}
    for engine in engines:
        found.setdefault(engine.worker_id, []).append(engine)
    return [
        {
            "kind": "worker",
            "id": worker_id,
            "host": own[0].host,
            "tells": f"{len(own)} engines, pid {own[0].supervisor_pid}, "
            f"{sum(engine.worker_rss_bytes + engine.core_rss_bytes for engine in own) / 2**20:.0f} MiB",
        }
        for worker_id, own in sorted(found.items())
    ]


ROOM = Room((Page("system", "/system", "Processes and Redis", _read, nav="Processes and Redis"),))
