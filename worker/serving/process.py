"""The worker process: reads its configuration, builds its parts, reports its state, stops in order.

Standard input: a line of JSON (``WorkerConfig``), for a standby a line of ``Activation``, then lines of ``SleepOrder``.
Its end means that the supervisor has exited.
Standard output: a ``WorkerStatus`` line per change of state and per second, so that a missing line shows a fault.
SIGTERM drains; a second one releases all requests immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from ...shared.deployment.records import DeathCause
from ...shared.errors import EngineDeadError, PenstockError
from ...shared.keys import Keys
from ...shared.messages.core import EngineCoreOutputs, Ready
from ...shared.messages.supervision import STALLED, Activation, EngineState, SleepOrder, SleepOrderDone
from ...shared.process.log import configure_logging
from ...shared.shards import make_connections
from ...shared.tracing.endpoint import is_enabled
from ..config.worker_config import WorkerConfig
from ..data_parallel.member import GroupMember, NoGroup
from ..processes.host import waited_for_processor_s
from ..text.tokenizer import TextCodec
from .core.cache import allocate_cache
from .core.client import CoreClient, CoreLostError, CoreStartupError, LoadTimeoutError
from .core.process import ForkServer
from .core.stall import StallWatch, until_hung
from .redis_waiting import LEAVE_PATIENCE_S, until_first, until_leaving
from .reporting.engine_meter import StepLog
from .reporting.heartbeat import Heartbeat, StatusLines
from .reporting.model_card import make_card
from .service import WorkerService

EXIT_FAILED, EXIT_CORE_DIED, EXIT_LOAD_TIMED_OUT = 1, 3, 4
ORPHAN_TIMEOUT_S = 15.0

log = structlog.get_logger()


class StopSignals:
    """Requests to stop this process.

    Attributes:
        stop: drain, then exit.
        at_once: release running requests instead of finishing them.
        is_orphaned: the supervisor has exited.
        on_order: called with each order of the supervisor.
        activation: the supervisor's order to serve; None while this process stands by.
        is_activated: set with ``activation``.
    """

    def __init__(self, activation: Activation | None) -> None:
        self.stop = asyncio.Event()
        self.at_once = asyncio.Event()
        self.is_orphaned = asyncio.Event()
        self.on_order: Callable[[SleepOrder], None] = lambda _: None
        self.activation = activation
        self.is_activated = asyncio.Event()
        if activation is not None:
            self.is_activated.set()
        # False before it serves and after a failure, when it has no requests to release.
        self.is_serving = False

    def install(self, lifeline: asyncio.StreamReader) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._request)
        # Ctrl-C reaches the whole process group; the supervisor alone decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return asyncio.create_task(self._watch_lifeline(lifeline))

    def _request(self) -> None:
        if self.stop.is_set():
            self.at_once.set()
        self.stop.set()

    async def _watch_lifeline(self, lifeline: asyncio.StreamReader) -> None:
        # A supervisor that is killed may leave a part of a line.
        while (line := await lifeline.readline()).endswith(b"\n"):
            if self.activation is None:
                self.activation = msgspec.json.decode(line, type=Activation)
                self.is_activated.set()
                continue
            self.on_order(msgspec.json.decode(line, type=SleepOrder))
        if self.is_serving:
            log.warning("supervisor_gone")
        self.is_orphaned.set()
        self.stop.set()
        self.at_once.set()


class WorkerProcess:
    """Worker process of an engine, from configuration to exit status."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._keys = Keys(config.namespace)
        # Retry for ever while Redis is unreachable, because every write must be confirmed.
        self._commands, self._subscriber = make_connections(
            config.redis_url, config.shards, self._keys, retry_for_s=float("inf")
        )
        self._heartbeat = Heartbeat(config, self._commands)
        log_options = ("--log-level", config.log_level, "--log-format", config.log_format)
        self._core = CoreClient(
            self._on_outputs,
            log_options,
            engine_id=config.process_id,
            fork_servers=_fork_servers(config),
            # The weights of a standby that loads them itself would take their memory once more.
            may_spawn=not config.standby_number,
        )
        self._group: GroupMember | NoGroup = NoGroup(config.engine)
        if config.engine.is_grouped:
            tell = self._heartbeat.set_group_status
            self._group = GroupMember(config, self._commands, self._subscriber, self._core, tell)
        self._service = WorkerService(config, self._commands, self._subscriber, self._core, self._heartbeat)
        self._step_log = StepLog(config.step_log, config.engine_id)
        self._stall_watch = StallWatch(
            self._core.progress, config.stall_timeout_s, lambda: waited_for_processor_s(self._core.pid)
        )
        self._has_stalled = False
        self._heartbeat.watch(self._core.progress, self._stall_watch)
        self._status = StatusLines(config.engine_id, self._heartbeat)

    async def run(self, signals: StopSignals) -> int:
        """Return the exit status: 0 after a drain, 1 if the start failed, 3 if the core died, 4 if it hung loading."""
        signals.on_order = lambda order: self._service.receive_order(order, self._report_outcome)
        reporting = asyncio.create_task(self._status.run())
        beating: asyncio.Task[None] | None = None
        try:
            await asyncio.gather(self._commands.open(), self._subscriber.open())
            load = self._sleep_unloaded if self._config.starts_asleep else self._start
            loading = asyncio.create_task(load(signals))
            await self._stand_by(loading, signals)
            if signals.activation is not None:
                self._heartbeat.activate(signals.activation.num_restarts)
                beating = asyncio.create_task(self._heartbeat.run())
            started = await loading
            if started is None or signals.activation is None:
                return 0
            return await self._serve(*started, signals)
        except Exception as error:
            signals.is_serving = False
            self._report_failure(error)
            return EXIT_LOAD_TIMED_OUT if isinstance(error, LoadTimeoutError) else EXIT_FAILED
        finally:
            await self._stop_serving(beating)
            reporting.cancel()
            self._status.report(EngineState.STOPPED)

    async def _stand_by(self, loading: asyncio.Task[tuple[Ready, TextCodec] | None], signals: StopSignals) -> None:
        """Wait until this process must serve or stop. Only a standby waits.

        Raises:
            CoreLostError: its core has ended.
            Exception: of ``loading``.
        """
        await until_first([loading], signals.stop, signals.is_activated)
        if signals.is_activated.is_set() or not loading.done() or loading.result() is None:
            return
        log.info("standby_ready", worker_pid=os.getpid(), core_pid=self._core.pid)
        await until_first([], signals.stop, signals.is_activated, self._core.dead)
        if self._core.dead.is_set() and not signals.stop.is_set():
            raise CoreLostError(await self._core.end())

    async def _sleep_unloaded(self, signals: StopSignals) -> tuple[Ready, TextCodec] | None:
        """Sleep without a core until a ``WakeUp``, then load the model; None if a stop came first."""
        service, started = self._service, None
        try:
            if await until_leaving(self._announce_sleep(), signals.stop) and await service.is_woken(signals.stop):
                started = await self._start(signals)
            return started
        except Exception as error:
            service.unloaded.report_failure(error)
            raise
        finally:
            if started is None:
                await service.leave_unloaded(signals.stop)

    async def _announce_sleep(self) -> None:
        """Publish that the engine sleeps, without a core."""
        self._heartbeat.state = EngineState.SLEEPING
        await self._heartbeat.adopt_card()
        await self._service.take_lease()
        await self._heartbeat.beat()
        self._status.report(EngineState.SLEEPING)

    async def _start(self, signals: StopSignals) -> tuple[Ready, TextCodec] | None:
        """Load the model; None if a stop came first."""
        starting = asyncio.create_task(self._start_core())
        watching = asyncio.create_task(self._watch_loading())
        await until_first([starting], signals.stop)
        watching.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return None
        ready = starting.result()
        ready.weights_version = self._config.weights_version or ready.weights_version
        codec = await asyncio.to_thread(
            TextCodec.load, Path(ready.model_folder), reasoning_parser=self._config.reasoning_parser
        )
        _collect_garbage_rarely()
        return ready, codec

    async def _start_core(self) -> Ready:
        config = await self._group.enter()
        if self._config.standby_number:
            config = msgspec.structs.replace(config, defers_cache=True)
        return await self._core.start(config, self._config.visible_devices)

    async def _allocate_cache(self) -> None:
        """Let the core of a former standby allocate its KV cache; others have one.

        Raises:
            CoreLostError: the core has ended.
            EngineCallError: the memory does not become free.
        """
        if not self._config.standby_number:
            return
        try:
            await allocate_cache(self._core.call)
        except EngineDeadError as error:
            raise CoreLostError(await self._core.end()) from error

    async def _serve(self, ready: Ready, codec: TextCodec, signals: StopSignals) -> int:
        signals.is_serving = True
        if not await until_leaving(self._announce(ready, codec), signals.stop, self._core.dead):
            if signals.stop.is_set():
                return 0
            raise CoreLostError(await self._core.end())
        watching = asyncio.create_task(self._watch_for_stalls())
        leaving = asyncio.create_task(self._leave_with_group(signals))
        await self._service.serve(ready, codec, signals.stop)
        if not self._core.dead.is_set():
            self._status.report(EngineState.DRAINING)
            num_returned = await self._service.drain(self._config.drain_timeout_s, signals.at_once)
            if num_returned:
                log.info("requests_handed_back", num_requests=num_returned)
            await self._group.leave(self._config.drain_timeout_s, signals.at_once)
        leaving.cancel()
        watching.cancel()
        if not self._core.dead.is_set():
            return 0
        await self._handle_core_exit(signals.stop)
        return EXIT_CORE_DIED

    async def _announce(self, ready: Ready, codec: TextCodec) -> None:
        """Publish that the engine serves from now on."""
        self._heartbeat.weights_version = ready.weights_version
        # Clients see the card before READY, and do not need the cache for it.
        await asyncio.gather(self._allocate_cache(), self._register(ready, codec))
        self._heartbeat.core_pid = self._core.pid
        # Before READY, because callers that refuse to wait for an engine check whether one holds a lease.
        await self._service.take_lease()
        # Before READY, so that a resize of the group can be refused if the experts do not divide by the new size.
        await self._group.serve(ready)
        self._heartbeat.set_sleep_level(0)
        self._heartbeat.state = EngineState.READY
        await self._heartbeat.beat()
        self._status.report(EngineState.READY)

    async def _watch_loading(self) -> None:
        """Kill a core that hangs while loading; ``CoreClient.start`` then raises ``LoadTimeoutError``."""
        finding = await until_hung(self._core, self._config.load_timeout_s)
        log.error("load_timed_out", finding=finding, core_pid=self._core.pid)
        self._heartbeat.error = finding
        self._core.kill_loading(finding)

    async def _watch_for_stalls(self) -> None:
        """Kill a core that makes no progress; its death is then handled like any other."""
        finding = await self._stall_watch.run()
        log.error("core_stalled", finding=finding)
        self._has_stalled = True
        self._core.kill(finding)

    async def _leave_with_group(self, signals: StopSignals) -> None:
        """Release all requests and stop once its group's ranks leave; the next process joins its next generation."""
        await self._group.has_left.wait()
        signals.stop.set()
        signals.at_once.set()

    async def _handle_core_exit(self, stop: asyncio.Event) -> None:
        """Report why the core died, and return its requests to the queue."""
        death = await self._core.end()
        self._heartbeat.error = death.reason
        self._status.report(
            EngineState.FAILED,
            code=STALLED if self._has_stalled else EngineDeadError.code,
            message=death.reason,
            trace=death.trace,
            is_external=death.is_external,
        )
        cause = DeathCause(
            engine_id=self._config.engine_id, reason=death.reason, last_step=death.last_step, trace=death.trace
        )
        await self._service.abandon(cause, stop, is_external=death.is_external)

    async def _register(self, ready: Ready, codec: TextCodec) -> None:
        is_tracing_enabled = is_enabled(self._config.otlp_traces_endpoint)
        card = await asyncio.to_thread(
            make_card, self._config.engine, ready, codec, is_tracing_enabled=is_tracing_enabled
        )
        await self._heartbeat.register(card)
        log.info(
            "engine_ready",
            model=card.model,
            architecture=card.architecture,
            dtype=ready.dtype,
            quantization=ready.quantization,
            device=ready.device,
            attention_backend=ready.attention_backend,
            instructions=ready.kernel_instructions,
            kv_cache_dtype=ready.kv_cache_dtype,
            kv_cache_tokens=ready.kv_cache_size_tokens,
            load_s=round(ready.load_time_s, 2),
            weights_version=ready.weights_version,
        )

    async def _stop_serving(self, beating: asyncio.Task[None] | None) -> None:
        if beating is not None:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        await self._core.stop()
        self._step_log.write()
        if beating is not None:
            # If Redis is unreachable, both records expire.
            with contextlib.suppress(PenstockError, TimeoutError):
                async with asyncio.timeout(LEAVE_PATIENCE_S):
                    await self._group.close()
                    await self._heartbeat.leave()
        await self._subscriber.close()
        await self._commands.close()

    def _report_outcome(self, outcome: SleepOrderDone) -> None:
        self._status.report(self._status.state, outcome=outcome)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._service.on_outputs(outputs)
        self._group.record_wave(outputs.scheduler_stats)
        self._step_log.record(outputs)

    def _report_failure(self, error: Exception) -> None:
        is_external = False
        if isinstance(error, CoreStartupError):
            trace = error.trace
        elif isinstance(error, CoreLostError):
            trace, is_external = error.death.trace, error.death.is_external
        else:
            trace = "" if isinstance(error, PenstockError) else "".join(traceback.format_exception(error))
        code = error.code if isinstance(error, PenstockError) else "worker_failed"
        self._status.report(EngineState.FAILED, code=code, message=str(error), trace=trace, is_external=is_external)


def _fork_servers(config: WorkerConfig) -> list[ForkServer]:
    """Return the processes that may fork the core, the preferred one first."""
    servers = [ForkServer(config.fork_server)] if config.fork_server else []
    if config.weights_keeper:
        keeper = ForkServer(config.weights_keeper, config.load_timeout_s or None)
        # A standby may not take memory for weights of its own.
        servers = [keeper] if config.standby_number else [keeper, *servers]
    return servers


def _collect_garbage_rarely() -> None:
    """Exclude the objects that exist now from garbage collection, and collect less often.

    Reference counting frees the outputs of a step, some hundred objects. By default every second step would start a
    collection, which costs a tenth of this process's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


async def serve(config: WorkerConfig, lifeline: asyncio.StreamReader) -> int:
    """Run a worker process inside the running loop and return its exit status."""
    signals = StopSignals(None if config.standby_number else Activation(num_restarts=config.num_restarts))
    watching = signals.install(lifeline)
    giving_up = asyncio.create_task(_leave_anyway(signals))
    try:
        return await WorkerProcess(config).run(signals)
    finally:
        giving_up.cancel()
        watching.cancel()


async def _leave_anyway(signals: StopSignals) -> None:
    """Exit if the supervisor has exited and the requests cannot be released, because Redis is unreachable too.

    No other process would ever stop this one, and its lease expires. The engine core exits when the channel closes.
    """
    await signals.is_orphaned.wait()
    await asyncio.sleep(ORPHAN_TIMEOUT_S)
    log.error("exited_without_release")
    os._exit(EXIT_FAILED)


async def _main() -> int:
    lifeline = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lifeline), sys.stdin)
    line = await lifeline.readline()
    config = msgspec.json.decode(line, type=WorkerConfig)
    configure_logging(config.log_level, config.log_format)
    structlog.contextvars.bind_contextvars(engine_id=config.engine_id)
    return await serve(config, lifeline)


def main() -> int:
    """Run the worker process, with uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_main())
    return uvloop.run(_main())
