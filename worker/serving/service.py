"""What a worker process does between READY and its end.

    claim loop ──Claim──▶ intake ──EngineCoreRequest──▶ engine core ──outputs──▶ generation ──Delta──▶ publisher

A request leaves when its last delta is handed to the publisher, when it is cancelled in Redis, or when Redis says
that its claim is stale: in answer to a write, or to the renewal of the lease.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from ...shared.broker import Broker, EngineCalls
from ...shared.broker.series import SeriesStore
from ...shared.connection import Subscriber
from ...shared.errors import DamagedRecordError
from ...shared.messages import CancelCommand, EngineCoreOutputs, EngineState, FinishReason, Ready
from ...shared.records import DeathCause
from ...shared.request_state import RequestState
from ..text.tokenizer import TextCodec
from ..worker_config import WorkerConfig
from .call_handler import ControlCalls, decode_command
from .claiming import ClaimLoop
from .core_client import CoreClient
from .engine_meter import EngineMeter
from .generation import Generation
from .heartbeat import Heartbeat
from .intake import Intake
from .publisher import Publisher
from .redis_pressure import RedisPressure
from .request_log import RequestLog
from .running_generations import RunningGenerations
from .series_writer import SeriesWriter
from .sleep import SleepControl
from .text_calls import TextCalls

LEASE_RENEWALS_PER_TTL = 3
_ENDED_FROM_OUTSIDE: dict[str | None, FinishReason] = {
    RequestState.CANCELLED: FinishReason.CANCELLED,
    RequestState.EXPIRED: FinishReason.EXPIRED,
}

log = structlog.get_logger()


class WorkerService:
    """Serves one engine core from one model's queue. Its parts come from ``process.py``."""

    def __init__(
        self,
        config: WorkerConfig,
        broker: Broker,
        calls: EngineCalls,
        subscriber: Subscriber,
        core: CoreClient,
        heartbeat: Heartbeat,
        pressure: RedisPressure,
        series: SeriesStore,
    ) -> None:
        self._config = config
        self._engine_id = config.engine_id
        self._broker = broker
        self._subscriber = subscriber
        self._core = core
        self._heartbeat = heartbeat
        self._meter = EngineMeter()
        heartbeat.engine_stats = self._meter.stats
        self._series = SeriesWriter(series, self._meter)
        self._live = RunningGenerations()
        interval_s = config.stream_interval_ms / 1000
        self._publisher = Publisher(broker, self._on_stale, self._meter, interval_s, lambda: pressure.pause_s)
        self._request_log = RequestLog(config.engine.model_name, is_on=config.log_requests)
        self._claiming = ClaimLoop(config, broker, core, self._live, self._publisher, self._request_log)
        self._telling: set[asyncio.Task[None]] = set()
        sleep = SleepControl(config.engine_id, broker, core, self._live, self._publisher, self._claiming, heartbeat)
        self._control = ControlCalls(config.engine_id, calls, core, sleep)

    async def take_lease(self) -> None:
        """Hold the engine's lease from now on; ``serve`` renews it."""
        await self._renew()

    async def serve(self, ready: Ready, codec: TextCodec, stop: asyncio.Event) -> None:
        """Claim and publish until ``stop`` is set or the core is dead; ``drain`` or ``abandon`` comes next."""
        keys = self._broker.keys
        text_calls = TextCalls(Path(ready.model_folder), codec, ready.max_model_len, ready.vocab_size)
        self._control.answer_too(text_calls.functions)
        for channel in (keys.engine_wake(self._engine_id), keys.wake):
            await self._subscriber.subscribe(channel, self._claiming.wake, self._claiming.wake)
        await self._subscriber.subscribe(keys.engine_commands(self._engine_id), self._on_command)
        self._publishing = asyncio.create_task(self._publisher.run())
        self._renewing = asyncio.create_task(self._renew_forever())
        self._counting = asyncio.create_task(self._series.run())
        intake = Intake(codec, ready.max_model_len)
        claiming = asyncio.create_task(self._claiming.run(intake, ready))
        ends = [asyncio.create_task(event.wait()) for event in (stop, self._core.dead)]
        works = [claiming, self._publishing, self._renewing]
        done, _ = await asyncio.wait([*works, *ends], return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        await self._control.close()
        self._claiming.stop()
        await claiming
        await self._claiming.leave()
        for task in done:
            task.result()

    async def drain(self, timeout_s: float, at_once: asyncio.Event) -> int:
        """Finish what fits into ``timeout_s``, hand the rest back, and return how many that was."""
        self._heartbeat.state = EngineState.DRAINING
        finished = asyncio.create_task(self._live.until_none())
        hurry = asyncio.create_task(at_once.wait())
        dead = asyncio.create_task(self._core.dead.wait())
        waits = [finished, hurry, dead]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        if self._core.dead.is_set():
            return 0
        await self._let_go()
        # What Redis says, not what we know: the reply of the last claim may have been lost.
        claims = await self._broker.claims(self._engine_id)
        num_returned = await self._broker.release(claims) if claims else 0
        await self.abandon(DeathCause(engine_id=self._engine_id, reason="the engine left"), is_external=True)
        return num_returned

    async def abandon(self, cause: DeathCause, *, is_external: bool) -> None:
        """Give up the lease and all claims: the core is dead, or nothing is left to do."""
        await self._let_go()
        num_returned, num_parked = await self._broker.reclaim(
            self._engine_id, cause, is_external=is_external, max_deliveries=self._config.max_deliveries
        )
        if num_returned or num_parked:
            log.warning("core_requests_taken_back", queued_again=num_returned, parked=num_parked, cause=cause.reason)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take one step's outputs from the core."""
        if outputs.scheduler_stats is not None:
            self._heartbeat.stats = outputs.scheduler_stats
            self._meter.note_scheduler(outputs.scheduler_stats)
        if outputs.step_stats is not None:
            self._meter.note_step(outputs.step_stats)
        intervals_s: list[float] = []
        num_at_once = 0
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
            self._heartbeat.num_tokens += num_tokens
            self._meter.note_tenant(generation.tenant, num_tokens, delta)
            if num_tokens > 1:
                num_at_once += num_tokens - 1
            if delta is None:
                self._publisher.gather(generation)
            else:
                self._publisher.publish(generation.request_id, generation.epoch, delta)
                if generation.finished:
                    self._request_log.note_end(generation, delta)
            if stop_core:
                self._core.abort_requests([output.request_id])
            if generation.finished:
                self._live.remove(generation.request_id)
            if generation.finished or was_on_probation:
                self._claiming.wake()
        if intervals_s or num_at_once:
            self._meter.note_token_intervals(intervals_s, num_at_once)

    async def _renew_forever(self) -> None:
        interval_s = self._config.lease_ttl_s / LEASE_RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(interval_s)
            # An idle engine polls, which renews its lease as well.
            if len(self._live) or not self._claiming.has_claimed_within(2 * interval_s):
                await self._renew()

    async def _renew(self) -> None:
        claims = self._live.claims()
        stale = set(await self._broker.renew(self._engine_id, claims, lease_ttl_ms=self._config.lease_ttl_ms))
        for request_id, epoch in claims:
            if request_id in stale:
                self._on_stale(request_id, epoch)

    async def _let_go(self) -> None:
        """Stop the work on everything, with what has been generated so far in Redis. Doing it twice does nothing."""
        self._renewing.cancel()
        self._core.abort_requests(self._live.core_ids())
        for request_id, _ in self._live.claims():
            self._live.remove(request_id)
        if not self._publishing.done():
            await self._flush()
        self._publishing.cancel()
        self._counting.cancel()
        await asyncio.gather(self._publishing, self._renewing, self._counting, *self._telling, return_exceptions=True)
        await self._series.add_or_tell()

    def _on_command(self, data: bytes) -> None:
        command = decode_command(data)
        if isinstance(command, CancelCommand):
            generation = self._live.get(command.request_id)
            if generation is not None:
                self._tell_later(generation.request_id, generation.epoch, generation, is_refused=False)
                self._drop(generation)
        else:
            self._control.receive(command)

    def _on_stale(self, request_id: str, epoch: int) -> None:
        """Redis has refused us: the request was cancelled, or moved while we were taken for dead."""
        self._claiming.look_for_unseen()
        generation = self._live.get(request_id)
        if generation is not None and generation.epoch != epoch:
            generation = None
        self._tell_later(request_id, epoch, generation, is_refused=True)
        self._drop(generation)

    def _tell_later(self, request_id: str, epoch: int, generation: Generation | None, *, is_refused: bool) -> None:
        telling = asyncio.create_task(self._tell_why(request_id, epoch, generation, is_refused=is_refused))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell_why(self, request_id: str, epoch: int, generation: Generation | None, *, is_refused: bool) -> None:
        """Log why work on a request was dropped: that it was cancelled is ordinary, that a claim has moved is not."""
        ids = {"request_id": request_id} if generation is None else generation.ids
        try:
            state = await self._broker.state(request_id)
        except DamagedRecordError as error:
            state = error.code
        end = _ENDED_FROM_OUTSIDE.get(state)
        if end is not None and generation is not None:
            self._request_log.note_dropped(generation, end)
        elif end is not None or not is_refused:
            log.debug("request_dropped", **ids, epoch=epoch, state=state)
        else:
            log.warning("claim_stale", **ids, epoch=epoch, state=state)

    def _drop(self, generation: Generation | None) -> None:
        if generation is None:
            return
        self._publisher.forget(generation.request_id)
        core_id = self._live.remove(generation.request_id)
        if core_id is not None:
            self._core.abort_requests([core_id])
        self._claiming.wake()

    async def _flush(self) -> None:
        """Wait until everything published is in Redis; a publisher that has failed raises instead."""
        flushing = asyncio.create_task(self._publisher.flush())
        await asyncio.wait([flushing, self._publishing], return_when=asyncio.FIRST_COMPLETED)
        flushing.cancel()
        if self._publishing.done():
            self._publishing.result()
