"""Processes other than engines that run, and those that are missing."""

from __future__ import annotations

from ...producer.control.deployment import Finding, count_due, jobs_findings
from ...shared.deployment.presence import ProcessRecord, read_processes
from .source import PageSnapshot

# Overdue work is reported only after it has been due for seconds, so a count may be that old.
DUE_CACHED_S = 5.0


async def processes_of(snapshot: PageSnapshot) -> list[ProcessRecord]:
    """Return the processes that report themselves, sorted by kind and start."""
    source = snapshot.source
    return await snapshot.once("processes", lambda: read_processes(source.connection.execute, source.keys))


async def missing_processes(snapshot: PageSnapshot) -> list[Finding]:
    """Return findings about due work that no process is running for."""
    source = snapshot.source

    async def read() -> dict[str, int]:
        return await source.cached("due", DUE_CACHED_S, lambda: count_due(source.connection, source.keys))

    return jobs_findings(await processes_of(snapshot), await snapshot.once("due", read))
