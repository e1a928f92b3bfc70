"""A child process of a gateway: ``python -m penstock.producer.gateway.processes.child LISTENER LINK``, run by the
parent.

Both arguments are inherited file descriptors: the listening socket, and the child's end of the socket pair to the
parent. The child serves until SIGTERM. It also stops when its parent ends for any reason: then a gateway started as a
replacement finds the port free, and running answers still have their time to end.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys

import uvicorn
from redis.exceptions import RedisError

from ....shared.errors import PenstockError
from ....shared.process.command_line import EXIT_FAILED, open_closed_streams
from ....shared.process.log import configure_logging, get_logger
from ..metrics import Family, Metrics
from ..serve import serve_on
from .messages import (
    MAX_LINE_BYTES,
    Begin,
    ChildMetrics,
    CollectMetrics,
    MergedMetrics,
    NotStarted,
    QueryAllMetrics,
    Ready,
    read_from_parent,
    write_message,
)

REPORT_INTERVAL_S = 1.0
# Longer than the parent waits for the other children.
SUM_TIMEOUT_S = 3.0

log = get_logger(__name__)


class ParentLink:
    """A child's connection to its parent.

    Args:
        metrics: counters of this process.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, metrics: Metrics) -> None:
        self._reader = reader
        self._writer = writer
        self._metrics = metrics
        self._query_ids = itertools.count(1)
        self._sums: dict[int, asyncio.Future[list[Family]]] = {}

    def report_ready(self) -> None:
        write_message(self._writer, Ready())

    async def sum_metrics(self) -> list[Family]:
        """Return the metrics of all processes, or of this one alone if the parent does not answer."""
        query_id, own = next(self._query_ids), self._metrics.families()
        answer = self._sums[query_id] = asyncio.get_running_loop().create_future()
        write_message(self._writer, QueryAllMetrics(query_id, own))
        try:
            async with asyncio.timeout(SUM_TIMEOUT_S):
                return await answer
        except TimeoutError:
            log.warning("gateway_parent_unresponsive", waited_s=SUM_TIMEOUT_S)
            return own
        finally:
            del self._sums[query_id]

    async def run(self) -> None:
        """Answer the parent until it ends; then stop this process gracefully."""
        reports = asyncio.create_task(self._report_periodically())
        try:
            while (message := await read_from_parent(self._reader)) is not None:
                if isinstance(message, CollectMetrics):
                    write_message(self._writer, ChildMetrics(self._metrics.families(), message.query_id))
                elif isinstance(message, MergedMetrics) and message.query_id in self._sums:
                    self._sums[message.query_id].set_result(message.families)
        finally:
            reports.cancel()
        log.warning("gateway_parent_exited", pid=os.getpid())
        os.kill(os.getpid(), signal.SIGTERM)

    async def _report_periodically(self) -> None:
        """Report the metrics, so that the parent still has them if this process dies, and to show that its loop is
        running."""
        while True:
            write_message(self._writer, ChildMetrics(self._metrics.families()))
            await asyncio.sleep(REPORT_INTERVAL_S)


async def _run_child(listener: socket.socket, link: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=link, limit=MAX_LINE_BYTES)
    begin = await read_from_parent(reader)
    if not isinstance(begin, Begin):
        return EXIT_FAILED
    configure_logging(begin.log_level, begin.log_format)
    metrics = Metrics()
    parent = ParentLink(reader, writer, metrics)
    parent_task = asyncio.create_task(parent.run())
    try:
        await serve_on(
            begin.settings,
            listener,
            parent.report_ready,
            metrics=metrics,
            sum_metrics=parent.sum_metrics,
            process=begin.process,
        )
    except (PenstockError, RedisError) as error:
        write_message(writer, NotStarted(str(error)))
        return EXIT_FAILED
    finally:
        parent_task.cancel()
        await asyncio.gather(parent_task, return_exceptions=True)
        writer.close()
    return 0


def main() -> int:
    """Serve on the file descriptors named by the arguments, and return the exit status."""
    open_closed_streams()
    listener, link = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    # The choice of event loop depends only on the packages installed.
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        return runner.run(_run_child(listener, link))


if __name__ == "__main__":
    sys.exit(main())
