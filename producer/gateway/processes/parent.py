"""The parent of a gateway's processes. It owns the listening socket, but serves no requests itself.

    listen ▶ start N children ──all ready──▶ "ready" ──signal──▶ close the socket, stop the children gracefully ▶ 0
                    └──one cannot start──▶ stop the others, and report its error

    each child:  start ─ready─▶ serve ─death─▶ pause of 0, 0.5, 1 … 30 s ▶ start

Invariants:
    All children accept from one socket, so no connection is assigned to a dead child.
    The socket is closed when this process is asked to stop, so no client waits in its backlog in vain.
    A child stops itself when its parent ends.
    The counters of a dead child stay in the sum.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from ....shared.errors import ConfigurationError
from ....shared.process import service_manager
from ....shared.process.children import STABLE_AFTER_S, ChildProcess, restart_delay_s, start_child
from ....shared.process.log import get_logger
from ....shared.process.service_manager import environment_of_children
from ....shared.process.waiting import wait_at_most
from ....shared.shards import check_servers
from ...web.server import announce, listening
from ..metrics import Family, counter, gauge, sum_families, without_gauges
from ..serve import PATH, warn_if_exposed
from ..settings import GatewaySettings
from .messages import (
    MAX_LINE_BYTES,
    Begin,
    ChildMetrics,
    CollectMetrics,
    FromChild,
    MergedMetrics,
    NotStarted,
    QueryAllMetrics,
    Ready,
    read_from_child,
    write_message,
)

MODULE = "penstock.producer.gateway.processes.child"

# If a child does not answer in time, its last report is used, which is at most a second old.
METRICS_TIMEOUT_S = 1.0
# Consecutive checks without a message from a child, which sends one per second. Checks are counted instead of seconds,
# because a parent that was itself stopped for a while must read the pending messages before it judges.
MAX_SILENT_CHECKS = 30
CHECK_INTERVAL_S = 1.0
# Added to the time that children wait for running answers.
SHUTDOWN_MARGIN_S = 10.0
log = get_logger(__name__)


class GatewayChild:
    """A child process from its start to its exit.

    Args:
        on_query: called with this child and its query when it requests the metrics of all processes.
        on_change: called when the child is ready.

    Attributes:
        families: the metrics that it reported last.
        has_reported: whether it has sent a message since the parent last set this to False.
        failure: why it does not serve, if it reported a reason.
    """

    def __init__(
        self, on_query: Callable[[GatewayChild, QueryAllMetrics], None], on_change: Callable[[], None]
    ) -> None:
        self._on_query = on_query
        self._on_change = on_change
        self._replies: dict[int, asyncio.Future[None]] = {}
        self._process: ChildProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.families: list[Family] = []
        self.is_ready = False
        self.has_reported = True
        self.failure = ""
        self._is_stop_requested = False

    @property
    def pid(self) -> int:
        """Process id; 0 before the process exists."""
        return self._process.pid if self._process is not None else 0

    async def run(self, listener: socket.socket, begin: Begin) -> int:
        """Start the process, handle its messages until it exits, and return its exit status, as ``Popen.returncode``
        does."""
        parent_end, child_end = socket.socketpair()
        with child_end:
            descriptors = (listener.fileno(), child_end.fileno())
            # In a new session, so that Ctrl-C reaches the parent alone, which stops its children gracefully.
            self._process = await start_child(
                [sys.executable, "-m", MODULE, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env=environment_of_children(),
                start_new_session=True,
            )
        if self._is_stop_requested:
            self.request_stop()
        reader, self._writer = await asyncio.open_connection(sock=parent_end, limit=MAX_LINE_BYTES)
        write_message(self._writer, begin)
        try:
            while (message := await read_from_child(reader)) is not None:
                self._handle(message)
            return await self._process.wait()
        finally:
            # The parent may be cancelled while the child runs, and must not leave it running.
            self.kill()
            self._writer.close()

    def request_stop(self) -> None:
        """Send SIGTERM: the first stops the child gracefully, the second immediately. A starting child receives it once
        it runs."""
        self._is_stop_requested = True
        self._send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the child with SIGKILL."""
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def collect_metrics(self, query_id: int) -> None:
        """Wait until the child has reported its current metrics, or has exited."""
        assert self._writer is not None
        reply = self._replies[query_id] = asyncio.get_running_loop().create_future()
        write_message(self._writer, CollectMetrics(query_id))
        try:
            await reply
        finally:
            del self._replies[query_id]

    def send_merged_metrics(self, query_id: int, families: list[Family]) -> None:
        """Reply to the child's query for the metrics of all processes."""
        assert self._writer is not None
        write_message(self._writer, MergedMetrics(query_id, families))

    def _handle(self, message: FromChild) -> None:
        self.has_reported = True
        match message:
            case Ready():
                self.is_ready = True
                self._on_change()
            case NotStarted(message=reason):
                self.failure = reason
            case ChildMetrics(families=families, query_id=query_id):
                self.families = families
                reply = self._replies.get(query_id)
                if reply is not None and not reply.done():
                    reply.set_result(None)
            case QueryAllMetrics(families=families):
                self.families = families
                self._on_query(self, message)


def serve_by_processes(
    settings: GatewaySettings, *, host: str, port: int, num_processes: int, log_level: str, log_format: str
) -> int:
    """Serve with ``num_processes`` processes until SIGTERM or SIGINT, as ``serve`` does with one, and return 0.

    Raises:
        ConfigurationError: as ``serve``, or a process cannot start.
    """
    begins = [Begin(settings, log_level, log_format, number) for number in range(num_processes)]

    async def run() -> None:
        await check_servers(settings.redis_url, settings.shards, namespace=settings.namespace, is_service=True)
        with listening(host, port) as listener:
            warn_if_exposed(settings, *listener.getsockname()[:2])
            async with service_manager.watched():
                await GatewayParent(begins, listener).run()

    asyncio.run(run())
    return 0


class GatewayParent:
    """Keeps one child running for each of ``begins``. All children serve on ``listener``."""

    def __init__(self, begins: list[Begin], listener: socket.socket) -> None:
        self._begins = begins
        self._listener = listener
        self._children: dict[int, GatewayChild] = {}
        self._ended_metrics: list[Family] = []
        self._num_restarts = 0
        self._query_ids = itertools.count(1)
        self._query_tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._num_signals = 0
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal arrives. No child is left when this returns.

        Raises:
            ConfigurationError: a child could not start before all were ready.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        runs = [asyncio.create_task(self._keep_running(begin)) for begin in self._begins]
        watch = asyncio.create_task(self._kill_stuck_children())
        try:
            await self._until_all_ready(runs)
            if not self._num_signals:
                announce(self._listener, PATH)
                await self._until_signal(runs)
        finally:
            # Pending connections are refused now, instead of waiting in vain.
            self._listener.close()
            await self._stop_children(runs)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _keep_running(self, begin: Begin) -> None:
        """Keep one child running until this process is asked to stop."""
        num_deaths, was_ready = 0, False
        loop = asyncio.get_running_loop()
        while not self._num_signals:
            child = self._children[begin.process] = GatewayChild(self._on_query, self._changed.set)
            began_at = loop.time()
            status = await child.run(self._listener, begin)
            self._ended_metrics = sum_families([self._ended_metrics, without_gauges(child.families)])
            child.families = []
            if self._num_signals:
                return
            was_ready |= child.is_ready
            if not was_ready:
                raise ConfigurationError(child.failure or f"a process of the gateway did not start (status {status})")
            if child.is_ready and loop.time() - began_at >= STABLE_AFTER_S:
                num_deaths = 0
            num_deaths += 1
            delay_s = restart_delay_s(num_deaths)
            log.error(
                "gateway_process_died",
                process=begin.process,
                pid=child.pid,
                status=status,
                reason=child.failure or "it was killed or crashed",
                restart_in_s=delay_s,
            )
            self._num_restarts += 1
            await wait_at_most(delay_s, self._stopping.wait())

    async def _until_all_ready(self, runs: list[asyncio.Task[None]]) -> None:
        while not self._num_signals and sum(child.is_ready for child in self._children.values()) < len(self._begins):
            await self._wait(runs)

    async def _until_signal(self, runs: list[asyncio.Task[None]]) -> None:
        while not self._num_signals:
            await self._wait(runs)

    async def _wait(self, runs: list[asyncio.Task[None]]) -> None:
        """Wait for a change. Raises the exception of a child that could not start."""
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait([changed, *runs], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self._changed.clear()
        for task in runs:
            if task.done():
                task.result()

    async def _kill_stuck_children(self) -> None:
        """Kill a child that has sent nothing for long: its event loop is stuck, and it would hold its connections."""
        num_silent: dict[int, int] = {}
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for process, child in self._children.items():
                is_silent = child.is_ready and not child.has_reported
                num_silent[process] = num_silent.get(process, 0) + 1 if is_silent else 0
                child.has_reported = False
                if num_silent[process] >= MAX_SILENT_CHECKS:
                    num_silent[process] = 0
                    log.error(
                        "gateway_process_unresponsive", process=process, pid=child.pid, num_checks=MAX_SILENT_CHECKS
                    )
                    child.kill()

    def _on_signal(self) -> None:
        """Stop all children: gracefully at the first signal, immediately at the second."""
        service_manager.tell_stopping()
        self._num_signals += 1
        self._changed.set()
        self._request_stop()

    def _request_stop(self) -> None:
        self._stopping.set()
        for child in self._children.values():
            child.request_stop()

    async def _stop_children(self, runs: list[asyncio.Task[None]]) -> None:
        if not self._num_signals:
            self._num_signals = 1
            self._request_stop()
        shutdown_s = self._begins[0].settings.shutdown_timeout_s
        _, late = await asyncio.wait(runs, timeout=shutdown_s + SHUTDOWN_MARGIN_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    def _on_query(self, child: GatewayChild, query: QueryAllMetrics) -> None:
        task = asyncio.create_task(self._merge_for(child, query.query_id))
        self._query_tasks.add(task)
        task.add_done_callback(self._query_tasks.discard)

    async def _merge_for(self, asker: GatewayChild, query_id: int) -> None:
        others = [child for child in self._children.values() if child is not asker and child.is_ready]
        if others:
            queries = [asyncio.create_task(child.collect_metrics(next(self._query_ids))) for child in others]
            _, late = await asyncio.wait(queries, timeout=METRICS_TIMEOUT_S)
            for task in late:
                task.cancel()
        asker.send_merged_metrics(query_id, self._sum())

    def _sum(self) -> list[Family]:
        num_ready = sum(child.is_ready and bool(child.families) for child in self._children.values())
        own = [
            gauge("penstock_gateway_processes", "Processes of this gateway that are serving", num_ready),
            counter("penstock_gateway_process_restarts", "Restarts of processes of this gateway", self._num_restarts),
        ]
        return sum_families([own, self._ended_metrics, *(child.families for child in self._children.values())])
