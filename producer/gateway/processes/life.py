"""One life of a child, as the parent sees it: how it begins, what it says, and its end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from ....shared.child_process import ChildProcess, start_child
from ....shared.service_manager import environment_of_children
from ..figures import Family
from .messages import (
    MAX_LINE_BYTES,
    AskAll,
    Begin,
    Figures,
    NotStarted,
    Ready,
    Tell,
    Told,
    read_to_parent,
    write,
)

MODULE = "penstock.producer.gateway.processes.child"


class ChildLife:
    """A child from its start to its end.

    Args:
        on_ask: called with this and what it says when it wants the figures of all.
        on_change: called when it is ready.

    Attributes:
        families: what it has counted, as it said last.
        has_spoken: whether it has said anything since ``has_spoken`` was last set to False by who watches it.
        failure: why it does not serve, if it said so.
    """

    def __init__(self, on_ask: Callable[[ChildLife, AskAll], None], on_change: Callable[[], None]) -> None:
        self._on_ask = on_ask
        self._on_change = on_change
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._process: ChildProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.families: list[Family] = []
        self.is_ready = False
        self.has_spoken = True
        self.failure = ""
        self._is_told_to_end = False

    @property
    def pid(self) -> int:
        """Process id; 0 before it is there."""
        return self._process.pid if self._process is not None else 0

    async def run(self, listener: socket.socket, begin: Begin) -> int:
        """Start it, hear it until it has ended, and return its exit status, as of ``Popen.returncode``."""
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = (listener.fileno(), theirs.fileno())
            # Of its own session: Ctrl-C reaches the parent alone, which ends its children in order.
            self._process = await start_child(
                [sys.executable, "-m", MODULE, *map(str, numbers)],
                pass_fds=numbers,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env=environment_of_children(),
                start_new_session=True,
            )
        if self._is_told_to_end:
            self.tell_to_end()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        write(self._writer, begin)
        try:
            while (message := await read_to_parent(reader)) is not None:
                self._take(message)
            return await self._process.wait()
        finally:
            # The parent may be cancelled while the child lives; it leaves no child behind.
            self.kill()
            self._writer.close()

    def tell_to_end(self) -> None:
        """SIGTERM: the first ends it in order, a second one at once. One that is just being started gets it then."""
        self._is_told_to_end = True
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def ask(self, number: int) -> None:
        """Return when it has said what it has counted by now, or cannot any more."""
        assert self._writer is not None
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        write(self._writer, Tell(number))
        try:
            await answer
        finally:
            del self._answers[number]

    def tell(self, number: int, families: list[Family]) -> None:
        """Answer its question of that number."""
        assert self._writer is not None
        write(self._writer, Told(number, families))

    def _take(self, message: Ready | NotStarted | Figures | AskAll) -> None:
        self.has_spoken = True
        match message:
            case Ready():
                self.is_ready = True
                self._on_change()
            case NotStarted(message=reason):
                self.failure = reason
            case Figures(families=families, asked=asked):
                self.families = families
                answer = self._answers.get(asked)
                if answer is not None and not answer.done():
                    answer.set_result(None)
            case AskAll(families=families):
                self.families = families
                self._on_ask(self, message)
