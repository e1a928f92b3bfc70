"""The service of a worker process between READY and its end: claim, compute, publish.

    claim loop ──Claim──▶ intake ──EngineCoreRequest──▶ engine core ──outputs──▶ generation ──Delta──▶ publisher

A request leaves when its last delta is passed to the publisher, when it is cancelled in Redis, or when Redis reports
its claim as stale, in reply to a write or to the renewal of the lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from ...shared.broker import Broker, EngineCalls
from ...shared.broker.request_history import RequestHistory
from ...shared.broker.series import SeriesStore
from ...shared.connection import CommandConnection, Subscriber
from ...shared.control.model import ReloadWeights
from ...shared.deployment.records import DeathCause
from ...shared.keys import Keys
from ...shared.messages.core import EngineCoreOutputs, Ready
from ...shared.messages.supervision import CancelCommand, EngineState, SleepOrder, SleepOrderDone
from ...shared.partitions import Layouts
from ...shared.tracing.endpoint import is_enabled
from ..config.worker_config import WorkerConfig
from ..text.tokenizer import TextCodec
from .calls.call_handler import ControlCalls, TextCalls, decode_command
from .calls.reload import WeightsReloading
from .calls.shared_device import OwnDevice, SharedDevice
from .calls.sleep import SleepControl
from .calls.unloaded import UnloadedSleep
from .claiming import ClaimLoop
from .core.client import CoreClient
from .lost_claims import LostClaims
from .partitions.partition_upkeep import PartitionUpkeep
from .partitions.served_partitions import ServedPartition, ServedPartitions
from .publisher import Publisher
from .redis_waiting import LEAVE_PATIENCE_S, RedisPressure, until_first, until_leaving
from .reporting.engine_meter import EngineMeter, SeriesWriter
from .reporting.heartbeat import Heartbeat, LoadedAdapters
from .reporting.observers import Departure, RequestLog, RequestObserver, RequestObservers
from .requests.intake import Intake
from .requests.running_generations import RunningGenerations

log = structlog.get_logger()


class WorkerService:
    """Serves one engine core from one model's queue, and composes the parts that claim, publish and answer calls.

    ``process.py`` creates it, and the connections, core and heartbeat that it shares with the rest of the process.

    Attributes:
        unloaded: answers calls until the core serves.
    """

    def __init__(
        self,
        config: WorkerConfig,
        commands: CommandConnection,
        subscriber: Subscriber,
        core: CoreClient,
        heartbeat: Heartbeat,
    ) -> None:
        self._config = config
        self._engine_id = config.engine_id
        self._commands = commands
        self._core = core
        self._heartbeat = heartbeat
        self._model = config.engine.model_name
        self._keys = Keys(config.namespace)
        self._meter = EngineMeter()
        heartbeat.engine_stats = self._meter.stats
        self._series = SeriesWriter(SeriesStore(commands, self._keys.model(self._model)), self._meter)
        self._live = RunningGenerations()
        layouts = Layouts(commands, self._keys)
        self._parts = ServedPartitions(self._engine_id, self._make_partition, lambda: layouts.read(self._model))
        request_log = RequestLog(self._model, is_on=config.log_requests, logs_prompts=config.log_prompts)
        self._observer = RequestObservers([request_log, *_span_observers(config, self._history_of)])
        self._claiming = ClaimLoop(config, self._parts, core, self._live, self._observer)
        self._lost_claims = LostClaims(self._parts, self._live, core, self._claiming, self._observer)
        self._sleep = SleepControl(
            config.engine_id, core, self._live, self._parts, self._claiming, heartbeat, self._observer
        )
        self.unloaded = UnloadedSleep(heartbeat)
        self._keeping: asyncio.Task[None] | None = None
        self._adapters = LoadedAdapters(config, commands, self._parts, core, heartbeat)
        self._background: list[asyncio.Task[None]] = []
        calls = EngineCalls(commands, self._keys.model(self._model))
        device = SharedDevice(heartbeat) if config.is_shared else OwnDevice()
        self._control = ControlCalls(config.engine_id, calls, core, heartbeat.try_to_beat, device)
        if config.starts_asleep:
            self._control.add_functions(self.unloaded.functions)
        self._upkeep = PartitionUpkeep(
            self._engine_id,
            self._parts,
            self._live,
            self._claiming,
            subscriber,
            self._on_command,
            self._on_stale,
            lease_ttl_s=config.lease_ttl_s,
        )

    def _make_partition(self, number: int) -> ServedPartition:
        keys = self._keys.model(self._model, number)
        pressure = RedisPressure(self._commands, keys)
        broker = Broker(self._commands, keys, number)
        publisher = Publisher(
            broker,
            partial(self._on_stale, number),
            self._meter,
            self._config.stream_interval_ms / 1000,
            pressure.output_pause_s,
        )
        return ServedPartition(broker, publisher, pressure)

    def _history_of(self, partition: int) -> RequestHistory:
        return RequestHistory(self._commands, self._keys.model(self._model, partition))

    def receive_order(self, order: SleepOrder, report: Callable[[SleepOrderDone], None]) -> None:
        """See ``ControlCalls.receive_order``."""
        self._control.receive_order(order, report)

    async def take_lease(self) -> None:
        """Acquire the engine's lease; ``serve`` and ``is_woken`` renew it."""
        await self._upkeep.take_leases()

    async def _begin(self, stop: asyncio.Event) -> asyncio.Task[None]:
        """Answer calls, and return the task that renews the lease. A second call only returns the task."""
        if self._keeping is None:
            await self._observer.open()
            await until_leaving(self._upkeep.begin(), stop, self._core.dead)
            self._keeping = asyncio.create_task(self._upkeep.run())
        return self._keeping

    async def is_woken(self, stop: asyncio.Event) -> bool:
        """Serve as an engine that sleeps without a core. Returns True once it is woken up, False if it must stop."""
        keeping = await self._begin(stop)
        for task in await until_first([keeping], stop, self.unloaded.woken):
            task.result()
        return not stop.is_set()

    async def leave_unloaded(self, stop: asyncio.Event) -> None:
        """Give up the lease of an engine that has no core. Once ``stop`` is set, wait for Redis only briefly."""
        await self._control.close(LEAVE_PATIENCE_S)
        cause = DeathCause(engine_id=self._engine_id, reason="the engine left")
        await self.abandon(cause, stop, is_external=True)

    async def serve(self, ready: Ready, codec: TextCodec, stop: asyncio.Event) -> None:
        """Claim and publish until ``stop`` is set or the core is dead; call ``drain`` or ``abandon`` next."""
        text_calls = TextCalls(Path(ready.model_folder), codec, ready.max_model_len, ready.vocab_size)
        load_timeout_s = self._config.load_timeout_s
        reloading = WeightsReloading(self._core, self._sleep, self._heartbeat, ready, load_timeout_s)
        functions = {**text_calls.functions, **self._sleep.functions, ReloadWeights: reloading.reload}
        self._control.add_functions(functions)
        keeping = await self._begin(stop)
        self.unloaded.confirm_awake()
        self._background.append(asyncio.create_task(self._series.run()))
        if ready.lora is not None:
            self._background.append(asyncio.create_task(self._adapters.run()))
        intake = Intake(codec, ready)
        claiming = asyncio.create_task(self._claiming.run(intake, ready))
        ended = await until_first([claiming, keeping], stop, self._core.dead)
        await self._control.close()
        self._claiming.stop()
        # Claimed requests may take long to prepare; otherwise the loop only waits for Redis.
        patience_s = self._config.drain_timeout_s if self._claiming.is_admitting else LEAVE_PATIENCE_S
        if not await until_leaving(claiming, stop, self._core.dead, patience_s=patience_s):
            log.warning("claim_aborted", waited_s=patience_s)
        await self._claiming.leave()
        for task in ended:
            task.result()

    async def drain(self, timeout_s: float, at_once: asyncio.Event) -> int:
        """Finish the requests that end within ``timeout_s``, release the others, and return their number.

        An unreachable Redis is waited for during ``LEAVE_PATIENCE_S``, and during ``timeout_s`` before that if
        requests run or deltas are unwritten.
        """
        self._heartbeat.state, self._heartbeat.drains_until = EngineState.DRAINING, time.time() + timeout_s
        loop = asyncio.get_running_loop()
        give_up_at = loop.time()
        if len(self._live) or not all(part.publisher.is_idle for part in self._parts):
            give_up_at += timeout_s
        finished = asyncio.create_task(self._live.until_none())
        hurry = asyncio.create_task(at_once.wait())
        dead = asyncio.create_task(self._core.dead.wait())
        waits = [finished, hurry, dead]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        if self._core.dead.is_set():
            return 0
        num_unfinished = len(self._live)
        await self._stop_work(Departure.HANDED_BACK)
        cause = DeathCause(engine_id=self._engine_id, reason="the engine left")
        num_returned: list[int] = []
        try:
            async with asyncio.timeout(max(0.0, give_up_at - loop.time()) + LEAVE_PATIENCE_S):
                num_returned = await asyncio.gather(*(self._hand_back(part, cause) for part in self._parts))
        except TimeoutError:
            # The supervisor, or the expiry of the lease, reclaims the requests instead.
            log.warning("lease_not_released", num_requests=num_unfinished)
        await self._end_tasks()
        return sum(num_returned)

    async def _hand_back(self, part: ServedPartition, cause: DeathCause) -> int:
        await self._upkeep.flush(part)
        # Ask Redis for the claims, because the reply of the last claim may have been lost.
        claims = await part.broker.claims(self._engine_id)
        num_returned = await part.broker.release(claims) if claims else 0
        await self._give_up(part, cause, is_external=True)
        return num_returned

    async def abandon(self, cause: DeathCause, stop: asyncio.Event, *, is_external: bool) -> None:
        """Give up the lease and all claims of a dead core. Once ``stop`` is set, wait for Redis only briefly."""
        num_unfinished = len(self._live)
        await self._stop_work(Departure.ENGINE_DIED, cause.reason)

        async def give_up() -> None:
            await asyncio.gather(*(self._give_up(part, cause, is_external=is_external) for part in self._parts))

        if not await until_leaving(give_up(), stop):
            log.warning("lease_not_released", num_requests=num_unfinished)
        await self._end_tasks()

    async def _give_up(self, part: ServedPartition, cause: DeathCause, *, is_external: bool) -> None:
        await self._upkeep.flush(part)
        num_returned, num_parked = await part.broker.reclaim(
            self._engine_id, cause, is_external=is_external, max_deliveries=self._config.max_deliveries
        )
        if num_returned or num_parked:
            log.warning("core_requests_reclaimed", queued_again=num_returned, parked=num_parked, cause=cause.reason)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Process the outputs of one step of the core."""
        self._adapters.update(outputs)
        if outputs.scheduler_stats is not None:
            self._heartbeat.stats = outputs.scheduler_stats
            self._meter.copy_scheduler_stats(outputs.scheduler_stats)
        if outputs.step_stats is not None:
            self._meter.record_step(outputs.step_stats)
        intervals_s: list[float] = []
        num_new = num_at_once = 0
        for output in outputs.outputs:
            generation = self._live.by_core_id(output.request_id)
            if generation is None:
                continue
            interval_s = generation.timing.note_output(output, outputs.timestamp)
            if interval_s is not None:
                intervals_s.append(interval_s)
            was_on_probation, num_before = generation.is_on_probation, generation.num_output_tokens
            delta, stop_core = generation.absorb(output)
            num_tokens = generation.num_output_tokens - num_before
            num_new += num_tokens
            self._meter.count_tenant(generation.tenant, num_tokens, delta)
            if num_tokens > 1:
                num_at_once += num_tokens - 1
            publisher = self._parts[generation.partition].publisher
            if delta is None:
                publisher.schedule(generation)
            else:
                num_prompt_tokens, num_cached_tokens = generation.pop_prompt_counts()
                if num_prompt_tokens:
                    self._meter.count_prompt(generation.tenant, num_prompt_tokens, num_cached_tokens)
                publisher.publish(generation.request_id, generation.epoch, delta)
                if generation.finished:
                    self._observer.record_end(generation, delta)
            if stop_core:
                self._core.abort_requests([output.request_id])
            if generation.finished:
                self._live.remove(generation.request_id)
            if generation.finished or was_on_probation:
                self._claiming.wake()
        if num_new:
            self._heartbeat.num_tokens += num_new
            self._meter.count_tokens(num_new, intervals_s, num_at_once)

    async def _stop_work(self, departure: Departure, cause: str = "") -> None:
        """Stop work on all requests. A second call does nothing."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._upkeep.stop()
        self._core.abort_requests(self._live.core_ids())
        for generation in self._live.all():
            self._observer.record_departure(generation, departure, cause)
            self._live.remove(generation.request_id)

    async def _end_tasks(self) -> None:
        await self._upkeep.end()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._lost_claims.close()
        await self._adapters.leave()
        await self._series.add_last()
        await self._observer.close()

    def _on_command(self, data: bytes) -> None:
        command = decode_command(data)
        if isinstance(command, CancelCommand):
            self._lost_claims.drop_cancelled(command.request_id)
        else:
            self._control.receive(command)

    def _on_stale(self, partition: int, request_id: str, epoch: int) -> None:
        self._lost_claims.drop_stale(partition, request_id, epoch)


def _span_observers(config: WorkerConfig, history_of: Callable[[int], RequestHistory]) -> list[RequestObserver]:
    """Return the observer that sends spans, in a list; empty if tracing is disabled.

    Args:
        history_of: returns the history of requests in the partition with a number.

    Raises:
        ConfigurationError: the endpoint is invalid, or OpenTelemetry is not installed.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None or not is_enabled(endpoint):
        return []
    # Imported here, so that OpenTelemetry is loaded only if tracing is enabled.
    from .reporting.attempt_spans import AttemptSpans

    return [AttemptSpans(endpoint, config.engine.model_name, config.engine_id, history_of)]
