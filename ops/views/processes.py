"""Which processes there are beside engines, and which are missing."""

from __future__ import annotations

from ...producer.control.deployment import Finding, count_due, jobs_findings
from ...shared.deployment.presence import ProcessRecord, read_processes
from .source import Moment

# What is due and not done has waited for seconds before it is told.
DUE_KEPT_S = 5.0


async def processes_of(moment: Moment) -> list[ProcessRecord]:
    """All that say that they are there, by kind and start."""
    source = moment.source
    return await moment.once("processes", lambda: read_processes(source.connection.execute, source.keys))


async def what_is_missing(moment: Moment) -> list[Finding]:
    """What is due while nobody is there who does it."""
    source = moment.source

    async def read() -> dict[str, int]:
        return await source.kept("due", DUE_KEPT_S, lambda: count_due(source.connection, source.keys))

    return jobs_findings(await processes_of(moment), await moment.once("due", read))
