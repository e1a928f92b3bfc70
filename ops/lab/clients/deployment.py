"""Redis, two workers with scripted engines, an embedder, and a gateway. One scripted engine can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import attrgetter
from pathlib import Path

from ....shared.connection import CommandConnection
from ....shared.deployment.presence import read_heartbeats
from ....shared.deployment.records import EngineHeartbeat
from ....shared.keys import Keys
from ...local.server import LocalGateway
from ...local.stack import LocalStack
from .answers import scripted_answer
from .model_folder import write_model_folder
from .scripted_server import ScriptedServer

MODEL = "demo"
EMBEDDER = "embedder"
EMBEDDER_FOLDER = Path(__file__).parents[2] / "demo" / "embedder"


class Deployment:
    """The deployment. Use it with ``with``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._exits = ExitStack()

    def __enter__(self) -> Deployment:
        with ExitStack() as exits:
            tokenizer = write_model_folder(self._folder / "model")
            self._servers = [ScriptedServer(tokenizer, scripted_answer) for _ in range(2)]
            for server in self._servers:
                exits.callback(server.shut_down)
            self._stack = exits.enter_context(
                LocalStack(
                    self._folder / "model",
                    ["--engine", "http", "--served-model-name", MODEL],
                    self._folder / "worker.log",
                    of_each=[["--engine-url", server.address] for server in self._servers],
                )
            )
            exits.enter_context(
                LocalStack(
                    EMBEDDER_FOLDER,
                    ["--served-model-name", EMBEDDER],
                    self._folder / "embedder.log",
                    redis_url=self._stack.url,
                )
            )
            self.gateway = exits.enter_context(LocalGateway(self._stack.url, [], self._folder / "gateway.log"))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    @property
    def base_url(self) -> str:
        """Address of the gateway, with /v1."""
        return self.gateway.base_url

    def killing_an_engine(self) -> AbstractContextManager[None]:
        """Kill the core of an engine; see the function of the same name."""
        return killing_an_engine(self._servers, self._stack)


@contextmanager
def killing_an_engine(
    servers: Sequence[ScriptedServer],
    stack: LocalStack,
    pid_of: Callable[[EngineHeartbeat], int] = attrgetter("core_pid"),
) -> Iterator[None]:
    """Kill the engine that gives the first answer within the block, after its first tokens.

    Args:
        servers: one for each worker of ``stack``.
        pid_of: returns the id of the process to kill.

    Raises:
        RuntimeError: no answer was started within the block.
    """
    for server in servers:
        server.is_held.clear()
        server.hold.set()
    stop, killed = threading.Event(), threading.Event()

    def kill_holder() -> None:
        while not stop.wait(0.02):
            for server, worker in zip(servers, stack.workers, strict=True):
                if server.is_held.is_set():
                    for other in servers:
                        other.hold.clear()
                    heartbeat = asyncio.run(_heartbeat_of(stack.url, worker.pid))
                    os.kill(pid_of(heartbeat), signal.SIGKILL)
                    killed.set()
                    return

    killer = threading.Thread(target=kill_holder, daemon=True)
    killer.start()
    try:
        yield
    finally:
        stop.set()
        killer.join()
        for server in servers:
            server.hold.clear()
    if not killed.is_set():
        raise RuntimeError("no engine was killed: the program started no answer of several tokens")


async def _heartbeat_of(url: str, supervisor_pid: int) -> EngineHeartbeat:
    commands = CommandConnection(url)
    try:
        heartbeats = await read_heartbeats(commands.execute, Keys())
    finally:
        await commands.close()
    return next(heartbeat for heartbeat in heartbeats if heartbeat.supervisor_pid == supervisor_pid)
