"""What a worker process does between READY and its end.

    claim loop ──Claim──▶ intake ──EngineCoreRequest──▶ engine core ──outputs──▶ generation ──Delta──▶ publisher

The claim loop asks for as many requests as the engine has free sequences. A request leaves when its last delta is
handed to the publisher, when it is cancelled in Redis, or when a write is refused because its claim went stale.
"""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from ...shared.broker import Broker, Claim
from ...shared.connection import Subscriber
from ...shared.errors import PenstockError, RedisUnavailableError
from ...shared.messages import (
    CancelCommand,
    Delta,
    EngineCommand,
    EngineCoreOutputs,
    EngineState,
    FinishReason,
    Ready,
    RequestError,
)
from ..text.tokenizer import TextCodec
from .core_client import CoreClient
from .generation import Generation
from .heartbeat import Heartbeat
from .intake import Intake
from .live import LiveGenerations
from .publisher import Publisher

IDLE_POLL_S = 1.0  # the wake channel is the way; this is for a message lost with its connection
REDIS_PAUSE_S = 0.2

log = structlog.get_logger()


class WorkerService:
    """Serves one engine core from one model's queue. Its parts come from ``process.py``."""

    def __init__(
        self, engine_id: str, broker: Broker, subscriber: Subscriber, core: CoreClient, heartbeat: Heartbeat
    ) -> None:
        self._engine_id = engine_id
        self._broker = broker
        self._subscriber = subscriber
        self._core = core
        self._heartbeat = heartbeat
        self._live = LiveGenerations()
        self._publisher = Publisher(broker, self._on_refused)
        self._wake = asyncio.Event()
        self._stopping = False

    async def serve(self, ready: Ready, codec: TextCodec, stop: asyncio.Event) -> None:
        """Claim and publish until ``stop`` is set or the core is dead; ``drain`` comes next.

        Raises:
            RedisUnavailableError: Redis stayed away for longer than writes are retried.
        """
        self._codec = codec
        self._intake = Intake(codec, ready.max_model_len)
        self._max_num_seqs = ready.max_num_seqs
        keys = self._broker.keys
        await self._subscriber.subscribe(keys.wake, lambda _: self._wake.set(), self._wake.set)
        await self._subscriber.subscribe(keys.engine_commands(self._engine_id), self._on_command)
        self._publishing = asyncio.create_task(self._publisher.run())
        claiming = asyncio.create_task(self._claim_forever())
        ends = [asyncio.create_task(event.wait()) for event in (stop, self._core.dead)]
        done, _ = await asyncio.wait([claiming, self._publishing, *ends], return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        # Not cancelled: a claim under way may have a wave in its reply, which would be nobody's.
        self._stopping = True
        self._wake.set()
        await claiming
        for task in done:
            task.result()

    async def drain(self, timeout_s: float, at_once: asyncio.Event) -> int:
        """Finish what fits into ``timeout_s``, hand the rest back, and return how many that was."""
        self._heartbeat.state = EngineState.DRAINING
        finished = asyncio.create_task(self._all_finished())
        hurry = asyncio.create_task(at_once.wait())
        dead = asyncio.create_task(self._core.dead.wait())
        waits = [finished, hurry, dead]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        claims = self._live.claims()
        self._core.abort_requests(self._live.core_ids())
        for request_id, _ in claims:
            self._live.remove(request_id)
        await self._flush()
        if claims:
            await self._broker.release(claims)
        await self._broker.forget_consumer(self._engine_id)
        self._publishing.cancel()
        await asyncio.gather(self._publishing, return_exceptions=True)
        return len(claims)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take one step's outputs from the core."""
        if outputs.scheduler_stats is not None:
            self._heartbeat.stats = outputs.scheduler_stats
        for output in outputs.outputs:
            generation = self._live.by_core_id(output.request_id)
            if generation is None:
                continue
            delta, stop_core = generation.absorb(output)
            self._heartbeat.num_tokens += len(delta.token_ids)
            if stop_core:
                self._core.abort_requests([output.request_id])
            self._publish(generation, delta)

    def _publish(self, generation: Generation, delta: Delta) -> None:
        self._publisher.publish(generation.request_id, generation.epoch, delta)
        if generation.finished:
            self._live.remove(generation.request_id)
            self._wake.set()

    async def _claim_forever(self) -> None:
        while not self._stopping:
            self._wake.clear()
            room = self._max_num_seqs - len(self._live)
            wave = await self._claim(room) if room > 0 else []
            for claim in wave:
                await self._admit(claim)
            if not wave and not self._stopping:
                try:
                    async with asyncio.timeout(IDLE_POLL_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _claim(self, limit: int) -> list[Claim]:
        try:
            return await self._broker.claim(self._engine_id, limit)
        except RedisUnavailableError as error:
            log.warning("no claim", error=str(error))
            await asyncio.sleep(REDIS_PAUSE_S)
            return []

    async def _admit(self, claim: Claim) -> None:
        """Hand a claimed request to the core, or its error to its caller."""
        try:
            request = await self._intake.prepare(claim)
            logged = await self._broker.read_log(claim.request_id) if claim.num_logged_tokens else []
            generation = Generation(request, self._codec, logged)
        except PenstockError as error:
            log.warning("request refused", request_id=claim.request_id, code=error.code, error=str(error))
            self._refuse(claim, RequestError(error.code, str(error), error.retryable))
            return
        older = self._live.add(generation)
        if older is not None:
            self._core.abort_requests([older])
        core_id = LiveGenerations.core_id(claim.request_id, claim.epoch)
        output_token_ids = [token_id for delta in logged for token_id in delta.token_ids]
        self._core.add_request(
            msgspec.structs.replace(
                request,
                request_id=core_id,
                external_req_id=claim.request_id,
                output_token_ids=output_token_ids or None,
            )
        )

    def _refuse(self, claim: Claim, error: RequestError) -> None:
        delta = Delta(index=claim.num_logged_tokens, finish_reason=FinishReason.ERROR, error=error)
        self._publisher.publish(claim.request_id, claim.epoch, delta)

    def _on_command(self, data: bytes) -> None:
        command = msgspec.msgpack.decode(data, type=EngineCommand)
        if isinstance(command, CancelCommand):
            self._drop(command.request_id)

    def _on_refused(self, request_id: str) -> None:
        if self._drop(request_id):
            log.warning("claim went stale: the request was cancelled or moved", request_id=request_id)

    def _drop(self, request_id: str) -> bool:
        core_id = self._live.remove(request_id)
        if core_id is None:
            return False
        self._core.abort_requests([core_id])
        self._wake.set()
        return True

    async def _flush(self) -> None:
        """Wait until everything published is in Redis; a publisher that has failed raises instead."""
        flushing = asyncio.create_task(self._publisher.flush())
        await asyncio.wait([flushing, self._publishing], return_when=asyncio.FIRST_COMPLETED)
        flushing.cancel()
        if self._publishing.done():
            self._publishing.result()

    async def _all_finished(self) -> None:
        while len(self._live):
            self._live.changed.clear()
            await self._live.changed.wait()
