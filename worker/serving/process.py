"""The worker process: reads its configuration, builds its parts, reports its state, leaves in order.

Standard input: one line of JSON (``WorkerConfig``); its end means the supervisor is gone.
Standard output: a ``WorkerStatus`` line per change of state. SIGTERM drains; a second one hands back at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import traceback
from pathlib import Path

import msgspec
import structlog

from ...shared.broker import Broker
from ...shared.connection import CommandConnection, Subscriber
from ...shared.errors import EngineDeadError, PenstockError
from ...shared.keys import Keys
from ...shared.log import configure_logging
from ...shared.messages import EngineCoreOutputs, EngineState, ModelCard, Ready, WorkerStatus
from ..config import WorkerConfig
from ..text.tokenizer import TextCodec
from .core_client import CoreClient, CoreStartupError
from .heartbeat import Heartbeat
from .service import WorkerService

EXIT_FAILED, EXIT_CORE_DIED = 1, 3

log = structlog.get_logger()


class StopSignals:
    """``stop``: leave in order. ``at_once``: hand back what runs instead of finishing it."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.at_once = asyncio.Event()

    def install(self, lifeline: asyncio.StreamReader) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._request)
        # Ctrl-C reaches the whole process group; the supervisor alone decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return asyncio.create_task(self._watch(lifeline))

    def _request(self) -> None:
        if self.stop.is_set():
            self.at_once.set()
        self.stop.set()

    async def _watch(self, lifeline: asyncio.StreamReader) -> None:
        await lifeline.read()
        log.warning("life line closed: handing back and leaving")
        self.stop.set()
        self.at_once.set()


class WorkerProcess:
    """One engine's worker process, from configuration to exit status."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._keys = Keys(config.namespace)
        self._commands = CommandConnection(config.redis_url)
        self._subscriber = Subscriber(config.redis_url)
        self._heartbeat = Heartbeat(config, self._commands)
        log_options = ("--log-level", config.log_level, "--log-format", config.log_format)
        self._core = CoreClient(self._on_outputs, log_options)
        broker = Broker(self._commands, self._keys.model(config.engine.model_name))
        self._service = WorkerService(config.engine_id, broker, self._subscriber, self._core, self._heartbeat)

    async def run(self, signals: StopSignals) -> int:
        """Return the exit status: 0 after a drain, 1 if the start failed, 3 if the core died."""
        self._report(EngineState.STARTING)
        beating: asyncio.Task[None] | None = None
        try:
            await asyncio.gather(self._commands.open(), self._subscriber.open())
            beating = asyncio.create_task(self._heartbeat.run())
            started = await self._start(signals)
            if started is None:
                return 0
            return await self._serve(*started, signals)
        except Exception as error:
            self._report_failure(error)
            return EXIT_FAILED
        finally:
            await self._leave(beating)

    async def _start(self, signals: StopSignals) -> tuple[Ready, TextCodec] | None:
        """Load the model; None if a stop came first."""
        starting = asyncio.create_task(self._core.start(self._config.engine, self._config.visible_devices))
        stopping = asyncio.create_task(signals.stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return None
        ready = starting.result()
        codec = await asyncio.to_thread(TextCodec.load, Path(ready.model_folder))
        return ready, codec

    async def _serve(self, ready: Ready, codec: TextCodec, signals: StopSignals) -> int:
        await self._register(ready)
        self._heartbeat.core_pid = self._core.pid
        self._heartbeat.state = EngineState.READY
        await self._heartbeat.beat()
        self._report(EngineState.READY)
        await self._service.serve(ready, codec, signals.stop)
        dead = self._core.dead.is_set()
        if dead:
            error = EngineDeadError(f"the engine core died ({await self._core.exit_status()})")
            self._heartbeat.error = str(error)
            self._report_failure(error)
        else:
            self._report(EngineState.DRAINING)
        num_returned = await self._service.drain(self._config.drain_timeout_s, signals.at_once)
        if num_returned:
            log.info("handed back unfinished requests", num_requests=num_returned)
        return EXIT_CORE_DIED if dead else 0

    async def _register(self, ready: Ready) -> None:
        card = ModelCard(
            model=self._config.engine.model_name,
            architecture=ready.architecture,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            dtype=ready.dtype,
        )
        await self._commands.execute("HSET", self._keys.models(), card.model, msgspec.json.encode(card))
        log.info(
            "ready",
            model=card.model,
            architecture=card.architecture,
            dtype=ready.dtype,
            device=ready.device,
            kv_cache_tokens=ready.kv_cache_size_tokens,
            load_s=round(ready.load_time_s, 2),
        )

    async def _leave(self, beating: asyncio.Task[None] | None) -> None:
        if beating is not None:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        await self._core.stop()
        if beating is not None:
            with contextlib.suppress(PenstockError):
                await self._heartbeat.leave()
        await self._subscriber.close()
        await self._commands.close()
        self._report(EngineState.STOPPED)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._service.on_outputs(outputs)

    def _report_failure(self, error: Exception) -> None:
        if isinstance(error, CoreStartupError):
            trace = error.trace
        else:
            trace = "" if isinstance(error, PenstockError) else "".join(traceback.format_exception(error))
        code = error.code if isinstance(error, PenstockError) else "worker_failed"
        self._report(EngineState.FAILED, code=code, message=str(error), trace=trace)

    def _report(self, state: EngineState, *, code: str = "", message: str = "", trace: str = "") -> None:
        status = WorkerStatus(engine_id=self._config.engine_id, state=state, code=code, message=message, trace=trace)
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone; the lifeline says so too
            sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
            sys.stdout.buffer.flush()


async def serve(config: WorkerConfig, lifeline: asyncio.StreamReader) -> int:
    """Run a worker process inside the running loop and return its exit status."""
    signals = StopSignals()
    watching = signals.install(lifeline)
    try:
        return await WorkerProcess(config).run(signals)
    finally:
        watching.cancel()


async def _main() -> int:
    lifeline = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lifeline), sys.stdin)
    line = await lifeline.readline()
    config = msgspec.json.decode(line, type=WorkerConfig)
    configure_logging(config.log_level, config.log_format)
    structlog.contextvars.bind_contextvars(engine_id=config.engine_id)
    return await serve(config, lifeline)


def main() -> int:
    """Run with uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_main())
    return uvloop.run(_main())
