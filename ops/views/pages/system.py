"""Processes that report themselves, the workers of the engines, and the Redis servers."""

from __future__ import annotations

from typing import Any

from ....shared.deployment.presence import ProcessRecord
from ....shared.deployment.records import EngineHeartbeat
from ..access import Access
from ..page import Page, PageSection, Params, View, problem_of
from ..servers import missing_processes, processes_of, read_servers, read_slow
from ..source import PageSnapshot, together


async def _read_system(snapshot: PageSnapshot, _: Params, __: Access) -> View:
    servers, engines, records, missing, (slow, slow_errors) = await together(
        read_servers(snapshot),
        snapshot.engines(),
        processes_of(snapshot),
        missing_processes(snapshot),
        read_slow(snapshot),
    )
    processes = [_process_row(record) for record in records]
    workers = _workers(engines)
    return {
        "rows": [server.row for server in servers],
        "problems": [
            *(problem_of(f"{one.message}; {one.remedy}", "/system", one.code) for one in missing),
            *(problem_of(str(risk), "/system", risk.code) for server in servers for risk in server.risks),
        ],
        "processes": processes,
        "workers": workers,
        "slow": slow,
        "slow_errors": slow_errors,
        "now": snapshot.at,
        "facts": {
            "processes": processes,
            "workers": workers,
            "missing": [finding.message for finding in missing],
            "slow": slow,
        },
    }


def _process_row(process: ProcessRecord) -> dict[str, Any]:
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
    """Return a row for each `worker start`, from the heartbeats of its engines."""
    by_worker: dict[str, list[EngineHeartbeat]] = {}
    for engine in engines:
        by_worker.setdefault(engine.worker_id, []).append(engine)
    return [
        {
            "worker": worker_id,
            "host": own[0].host,
            "pid": own[0].supervisor_pid,
            "engines": len(own),
            "memory_bytes": sum(engine.worker_rss_bytes + engine.core_rss_bytes for engine in own),
        }
        for worker_id, own in sorted(by_worker.items())
    ]


SECTION = PageSection((Page("system", "/system", "Processes and Redis", _read_system, nav="Processes and Redis"),))
