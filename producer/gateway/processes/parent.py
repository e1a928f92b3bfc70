"""The parent of a gateway's processes: it owns the listening socket, and serves nothing itself.

    listen ▶ start N children ──all ready──▶ "ready" ──signal──▶ close the socket, end the children in order ▶ 0
                    └──one cannot start──▶ end the others, and its sentence

    each child:  start ─ready─▶ serve ─death─▶ pause of 0, 0.5, 1 … 30 s ▶ start

Invariants: all children accept from one socket, so a connection is never left to one that is dead; the socket is closed
when this process has been told to end, so nobody waits in its line in vain; a child that hears the end of its parent
ends itself. What a child counted is added to the sum when it dies.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
from contextlib import suppress

from ....shared import service_manager
from ....shared.errors import ConfigurationError
from ....shared.log import get_logger
from ....shared.restart_delay import STABLE_AFTER_S, restart_delay_s
from ....shared.shards import check_servers
from ...web.server import announce, listening
from ..figures import Family, add_up, counter, gauge, without_gauges
from ..serve import PATH, warn_of_strangers
from ..settings import GatewaySettings
from .life import ChildLife
from .messages import AskAll, Begin

# A child that does not answer within this is told of as it was, at most a second ago.
FIGURES_TIMEOUT_S = 1.0
# Looks in a row that found no word of a child which says something every second. They are counted, not seconds: a
# parent that was itself stopped for a while must hear what was said meanwhile before it judges.
MAX_SILENT_LOOKS = 30
LOOK_INTERVAL_S = 1.0
# Beyond the time that children give running answers.
SHUTDOWN_MARGIN_S = 10.0

log = get_logger(__name__)


def serve_by_processes(
    settings: GatewaySettings, *, host: str, port: int, num_processes: int, log_level: str, log_format: str
) -> int:
    """Serve by so many processes until SIGTERM or SIGINT, as ``serve`` does by one, and return 0.

    Raises:
        ConfigurationError: as ``serve``; or a process cannot start.
    """
    begins = [Begin(settings, log_level, log_format, number) for number in range(num_processes)]

    async def run() -> None:
        await check_servers(settings.redis_url, settings.shards, namespace=settings.namespace, is_service=True)
        with listening(host, port) as listener:
            warn_of_strangers(settings, *listener.getsockname()[:2])
            async with service_manager.watched():
                await GatewayParent(begins, listener).run()

    asyncio.run(run())
    return 0


class GatewayParent:
    """Keeps a child for each of ``begins``, all of which serve on ``listener``."""

    def __init__(self, begins: list[Begin], listener: socket.socket) -> None:
        self._begins = begins
        self._listener = listener
        self._lives: dict[int, ChildLife] = {}
        self._of_the_dead: list[Family] = []
        self._num_restarts = 0
        self._numbers = itertools.count(1)
        self._answering: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._num_signals = 0
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal comes; no child is left when this returns.

        Raises:
            ConfigurationError: a child could not start before all had.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        keeping = [asyncio.create_task(self._keep(begin)) for begin in self._begins]
        watching = asyncio.create_task(self._watch())
        try:
            await self._until_all_ready(keeping)
            if not self._num_signals:
                announce(self._listener, PATH)
                await self._until_signal(keeping)
        finally:
            # What is left in its line is refused now, instead of waiting for nobody.
            self._listener.close()
            await self._end(keeping)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _keep(self, begin: Begin) -> None:
        """Keep one child running until this process is told to end."""
        num_deaths, was_ready = 0, False
        loop = asyncio.get_running_loop()
        while not self._num_signals:
            life = self._lives[begin.process] = ChildLife(self._on_ask, self._changed.set)
            began_at = loop.time()
            status = await life.run(self._listener, begin)
            self._of_the_dead = add_up([self._of_the_dead, without_gauges(life.families)])
            life.families = []
            if self._num_signals:
                return
            was_ready |= life.is_ready
            if not was_ready:
                raise ConfigurationError(life.failure or f"a process of the gateway did not start (status {status})")
            if life.is_ready and loop.time() - began_at >= STABLE_AFTER_S:
                num_deaths = 0
            num_deaths += 1
            delay_s = restart_delay_s(num_deaths)
            log.error(
                "gateway_process_died",
                process=begin.process,
                pid=life.pid,
                status=status,
                reason=life.failure or "it was killed, or crashed",
                restart_in_s=delay_s,
            )
            self._num_restarts += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._ending.wait()

    async def _until_all_ready(self, keeping: list[asyncio.Task[None]]) -> None:
        while not self._num_signals and sum(life.is_ready for life in self._lives.values()) < len(self._begins):
            await self._wait(keeping)

    async def _until_signal(self, keeping: list[asyncio.Task[None]]) -> None:
        while not self._num_signals:
            await self._wait(keeping)

    async def _wait(self, keeping: list[asyncio.Task[None]]) -> None:
        """Return when something has changed; raises what ended the keeping of a child."""
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait([changed, *keeping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self._changed.clear()
        for task in keeping:
            if task.done():
                task.result()

    async def _watch(self) -> None:
        """Kill a child that has been silent for long: its loop does not turn, and it would keep its connections."""
        num_silent: dict[int, int] = {}
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            for process, life in self._lives.items():
                is_silent = life.is_ready and not life.has_spoken
                num_silent[process] = num_silent.get(process, 0) + 1 if is_silent else 0
                life.has_spoken = False
                if num_silent[process] >= MAX_SILENT_LOOKS:
                    num_silent[process] = 0
                    log.error("gateway_process_silent", process=process, pid=life.pid, looks=MAX_SILENT_LOOKS)
                    life.kill()

    def _on_signal(self) -> None:
        """The first signal ends all in order, a second one at once."""
        service_manager.tell_stopping()
        self._num_signals += 1
        self._changed.set()
        self._tell_to_end()

    def _tell_to_end(self) -> None:
        self._ending.set()
        for life in self._lives.values():
            life.tell_to_end()

    async def _end(self, keeping: list[asyncio.Task[None]]) -> None:
        if not self._num_signals:
            self._num_signals = 1
            self._tell_to_end()
        shutdown_s = self._begins[0].settings.shutdown_timeout_s
        _, late = await asyncio.wait(keeping, timeout=shutdown_s + SHUTDOWN_MARGIN_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)

    def _on_ask(self, life: ChildLife, question: AskAll) -> None:
        task = asyncio.create_task(self._answer(life, question.asked))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, asker: ChildLife, number: int) -> None:
        others = [life for life in self._lives.values() if life is not asker and life.is_ready]
        if others:
            asking = [asyncio.create_task(life.ask(next(self._numbers))) for life in others]
            _, late = await asyncio.wait(asking, timeout=FIGURES_TIMEOUT_S)
            for task in late:
                task.cancel()
        asker.tell(number, self._sum())

    def _sum(self) -> list[Family]:
        num_ready = sum(life.is_ready and bool(life.families) for life in self._lives.values())
        own = [
            gauge("penstock_gateway_processes", "Processes of this gateway that serve", num_ready),
            counter("penstock_gateway_process_restarts", "How often one was started again", self._num_restarts),
        ]
        return add_up([own, self._of_the_dead, *(life.families for life in self._lives.values())])
