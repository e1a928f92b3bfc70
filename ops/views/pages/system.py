"""Processes as they say that they are there, the workers of the engines, and the Redis servers."""

from __future__ import annotations

from typing import Any

from ....shared.deployment.presence import ProcessRecord
from ....shared.deployment.records import EngineHeartbeat
from ..access import Access
from ..page import Page, Params, Room, View
from ..processes import processes_of, what_is_missing
from ..servers import read_servers
from ..slow import read_slow
from ..source import Moment, together


async def _read(moment: Moment, _: Params, __: Access) -> View:
    servers, engines, processes, missing, (slow, untold) = await together(
        read_servers(moment), moment.engines(), processes_of(moment), what_is_missing(moment), read_slow(moment)
    )
    told = [_process(process) for process in processes]
    workers = _workers(engines)
    return {
        "rows": [server.row for server in servers],
        "problems": [
            *(f"{finding.message}; {finding.remedy}" for finding in missing),
            *(text for server in servers for text in server.problems),
        ],
        "processes": told,
        "workers": workers,
        "slow": slow,
        "untold": untold,
        "now": moment.at,
        "facts": {
            "processes": told,
            "workers": workers,
            "missing": [finding.message for finding in missing],
            "slow": slow,
        },
    }


def _process(process: ProcessRecord) -> dict[str, Any]:
    return {
        "process": process.process_id,
        "kind": process.kind,
        "host": process.host,
        "pid": process.pid,
        "package_version": process.package_version,
        "started_at": process.started_at,
        "options": process.options,
        "last_error": process.last_error,
        "last_error_at": process.last_error_at or None,
    }


def _workers(engines: list[EngineHeartbeat]) -> list[dict[str, Any]]:
    """A line for each `worker start`, by what its engines say."""
    found: dict[str, list[EngineHeartbeat]] = {}
    for engine in engines:
        found.setdefault(engine.worker_id, []).append(engine)
    return [
        {
            "worker": worker_id,
            "host": own[0].host,
            "pid": own[0].supervisor_pid,
            "engines": len(own),
            "memory_bytes": sum(engine.worker_rss_bytes + engine.core_rss_bytes for engine in own),
        }
        for worker_id, own in sorted(found.items())
    ]


ROOM = Room((Page("system", "/system", "Processes and Redis", _read, nav="Processes and Redis"),))
