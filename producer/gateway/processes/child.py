"""A process of a gateway: ``python -m penstock.producer.gateway.processes.child LISTENER LINK``, started by the parent.

Both arguments are file descriptors that it has inherited: the listening socket, and its end of the socket pair to its
parent. It serves until SIGTERM. The end of the parent is one, too, whatever ended it: a gateway that is started in its
place finds the port free, and running answers have the time that they have at any end.
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

from ....shared.command_line import EXIT_FAILED
from ....shared.errors import PenstockError
from ....shared.log import configure_logging, get_logger
from ....shared.standard_streams import open_closed_streams
from ..figures import Family
from ..metrics import Metrics
from ..serve import serve_on
from .messages import MAX_LINE_BYTES, AskAll, Begin, Figures, NotStarted, Ready, Tell, Told, read_to_child, write

TELL_EVERY_S = 1.0
# Longer than the parent gives the other children.
SUM_TIMEOUT_S = 3.0

log = get_logger(__name__)


class ParentLink:
    """What a child has of its parent.

    Args:
        metrics: of this process.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, metrics: Metrics) -> None:
        self._reader = reader
        self._writer = writer
        self._metrics = metrics
        self._numbers = itertools.count(1)
        self._sums: dict[int, asyncio.Future[list[Family]]] = {}

    def say_ready(self) -> None:
        write(self._writer, Ready())

    async def sum_figures(self) -> list[Family]:
        """Return the figures of all processes; those of this one alone where the parent does not answer."""
        number, own = next(self._numbers), self._metrics.families()
        answer = self._sums[number] = asyncio.get_running_loop().create_future()
        write(self._writer, AskAll(number, own))
        try:
            async with asyncio.timeout(SUM_TIMEOUT_S):
                return await answer
        except TimeoutError:
            log.warning("gateway_parent_silent", waited_s=SUM_TIMEOUT_S)
            return own
        finally:
            del self._sums[number]

    async def run(self) -> None:
        """Answer the parent until it ends, which ends this process in order."""
        telling = asyncio.create_task(self._tell_now_and_then())
        try:
            while (message := await read_to_child(self._reader)) is not None:
                if isinstance(message, Tell):
                    write(self._writer, Figures(self._metrics.families(), message.asked))
                elif isinstance(message, Told) and message.asked in self._sums:
                    self._sums[message.asked].set_result(message.families)
        finally:
            telling.cancel()
        log.warning("gateway_parent_gone", pid=os.getpid())
        os.kill(os.getpid(), signal.SIGTERM)

    async def _tell_now_and_then(self) -> None:
        """Tell the parent what would otherwise be lost with this process, and that its loop turns."""
        while True:
            write(self._writer, Figures(self._metrics.families()))
            await asyncio.sleep(TELL_EVERY_S)


async def _run(listener: socket.socket, link: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=link, limit=MAX_LINE_BYTES)
    begin = await read_to_child(reader)
    if not isinstance(begin, Begin):
        return EXIT_FAILED
    configure_logging(begin.log_level, begin.log_format)
    metrics = Metrics()
    parent = ParentLink(reader, writer, metrics)
    hearing = asyncio.create_task(parent.run())
    try:
        await serve_on(
            begin.settings,
            listener,
            parent.say_ready,
            metrics=metrics,
            sum_figures=parent.sum_figures,
            process=begin.process,
        )
    except (PenstockError, RedisError) as error:
        write(writer, NotStarted(str(error)))
        return EXIT_FAILED
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        writer.close()
    return 0


def main() -> int:
    """Serve by the descriptors that the arguments name; returns the exit status."""
    open_closed_streams()
    listener, link = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    # Its factory of loops depends on nothing but what is installed.
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        return runner.run(_run(listener, link))


if __name__ == "__main__":
    sys.exit(main())
