"""The claim loop: asks Redis for as many requests as the engine has room for, and hands them to the engine core."""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from ...shared.broker import SEQS_PER_KEPT_ONE, Broker, Claim, Room, Wave
from ...shared.errors import PenstockError, RedisUnavailableError
from ...shared.messages import Delta, FinishReason, Ready, RequestError
from ...shared.records import DeathCause
from ..worker_config import WorkerConfig
from .core_client import CoreClient
from .generation import Generation, SegmentGeneration
from .intake import Intake, UndecodableEntryError, ids_of
from .publisher import Publisher
from .request_log import RequestLog
from .running_generations import RunningGenerations
from .segments import Segment

REDIS_PAUSE_S = 0.2
LEAVE_TIMEOUT_S = 1.0
# A claim that a stopped Redis still had in its socket may be carried out after we have looked.
LOOK_FOR_UNSEEN_EVERY_S = 10.0

_NO_WAVE = Wave([])

log = structlog.get_logger()


class ClaimLoop:
    """Claims waves until ``stop``. Its parts are shared with the ``WorkerService``."""

    def __init__(
        self,
        config: WorkerConfig,
        broker: Broker,
        core: CoreClient,
        live: RunningGenerations,
        publisher: Publisher,
        request_log: RequestLog,
    ) -> None:
        self._request_log = request_log
        self._engine_id = config.engine_id
        self._lease_ttl_ms = config.lease_ttl_ms
        self._broker = broker
        self._core = core
        self._live = live
        self._publisher = publisher
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._is_paused = False
        self._claiming = asyncio.Lock()
        # A claim of this engine's former life may have been carried out after its claims were taken back.
        self._may_hold_unseen = True
        self._looked_for_unseen_at = time.monotonic()
        self._claimed_at = 0.0

    def has_claimed_within(self, seconds: float) -> bool:
        """Whether a claim, which renews the lease, was answered so lately."""
        return time.monotonic() - self._claimed_at < seconds

    def wake(self, _: object = None) -> None:
        """Look again: something came for this engine, the queue goes on, or there is more room."""
        self._wake.set()

    def look_for_unseen(self) -> None:
        """Compare with Redis before the next claim: it may say of a request that it is ours, and we know nothing of it.

        A claim whose reply was lost may have handed out a wave, and a Redis that came back without its last second
        refuses what we append to a log that is shorter than we know.
        """
        self._may_hold_unseen = True

    def stop(self) -> None:
        """Claim nothing more. A claim under way is admitted first: the wave in its reply would be nobody's."""
        self._is_stopping = True
        self._wake.set()

    async def leave(self) -> None:
        """Let nobody count on this engine's room or wake it; after ``stop``. Not for long: that heals by itself."""
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._broker.withdraw(self._engine_id)
        except (TimeoutError, RedisUnavailableError) as error:
            log.warning("room_not_withdrawn", error=str(error))

    async def pause(self) -> None:
        """Claim nothing until ``resume``. Returns when a claim under way is admitted; doing it twice does nothing."""
        self._is_paused = True
        async with self._claiming:
            await self._broker.withdraw(self._engine_id)

    def resume(self) -> None:
        """Claim again; does nothing if it was not paused."""
        self._is_paused = False
        self._wake.set()

    async def run(self, intake: Intake, ready: Ready) -> None:
        """Claim and admit until ``stop``."""
        while not self._is_stopping:
            self._wake.clear()
            async with self._claiming:
                wave = await self._claim(ready)
                num_admitted = sum([await self._admit(claim, intake) for claim in wave.claims])
            # One that was refused has left room of which Redis knows nothing.
            if num_admitted == len(wave.claims) and not self._is_stopping:
                try:
                    async with asyncio.timeout(wave.wait_s):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _claim(self, ready: Ready) -> Wave:
        if self._may_hold_unseen or time.monotonic() - self._looked_for_unseen_at > LOOK_FOR_UNSEEN_EVERY_S:
            await self._release_unseen()
        if self._is_paused or len(self._live) >= ready.max_num_seqs or self._live.has_probationer:
            return _NO_WAVE
        room = Room(
            max_num_seqs=ready.max_num_seqs,
            num_seqs=len(self._live),
            num_kv_tokens=ready.kv_cache_size_tokens,
            num_held_kv_tokens=self._live.num_kv_tokens(ready.block_size),
            num_kept_seqs=ready.max_num_seqs // SEQS_PER_KEPT_ONE,
        )
        try:
            wave = await self._broker.claim(self._engine_id, room, lease_ttl_ms=self._lease_ttl_ms)
        except RedisUnavailableError as error:
            log.warning("claim_failed", error=str(error))
            self.look_for_unseen()
            await asyncio.sleep(REDIS_PAUSE_S)
            return _NO_WAVE
        self._claimed_at = time.monotonic()
        return wave

    async def _release_unseen(self) -> None:
        """Hand back what Redis says we hold and we do not."""
        held = await self._broker.claims(self._engine_id)
        # What ended here since has been written after this; it would look like something unseen before.
        await self._publisher.flush()
        known = set(self._live.claims())
        unseen = [claim for claim in held if claim not in known]
        num_released = await self._broker.release(unseen) if unseen else 0
        self._may_hold_unseen = False
        self._looked_for_unseen_at = time.monotonic()
        if num_released:
            log.warning("unknown_requests_handed_back", num_requests=num_released)

    async def _admit(self, claim: Claim, intake: Intake) -> bool:
        """Hand a claimed request to the core, or its error to its caller; returns whether the core has it."""
        try:
            segment = await self._segment(claim, intake)
            kind = SegmentGeneration if segment.request.resumable else Generation
            generation = kind(segment, intake.codec, claim)
        except UndecodableEntryError as error:
            log.warning("request_undecodable", **ids_of(claim), error=str(error))
            cause = DeathCause(engine_id=self._engine_id, reason=str(error))
            await self._broker.park(claim, cause, error.code, str(error))
            return False
        except PenstockError as error:
            log.warning("request_refused", **ids_of(claim), code=error.code, error=str(error))
            self._refuse(claim, RequestError(error.code, str(error), error.retryable))
            return False
        log.debug("request_claimed", **generation.ids, num_deliveries=claim.attempt)
        older = self._live.add(generation)
        if older is not None:
            self._core.abort_requests([older])
        if claim.expires_in_ms >= 0:
            loop = asyncio.get_running_loop()
            generation.expiry = loop.call_later(claim.expires_in_ms / 1000, self._expire, generation)
        core_id = RunningGenerations.core_id(claim.request_id, claim.epoch)
        self._core.add_request(
            msgspec.structs.replace(
                segment.request,
                request_id=core_id,
                output_token_ids=segment.output_token_ids or None,
            )
        )
        return True

    async def _segment(self, claim: Claim, intake: Intake) -> Segment:
        """Return what is to be generated under a claim; a request that is not resumable has one segment."""
        request = await intake.prepare(claim)
        if request.resumable:
            logged = await self._broker.read_log(claim.request_id)
            return await intake.segment(request, await self._broker.input.read(claim.request_id), logged)
        return Segment(request, await self._broker.read_log(claim.request_id) if claim.num_logged_tokens else [])

    def _expire(self, generation: Generation) -> None:
        """Its deadline has come while it was here, which its removal would have prevented."""
        last = generation.cut_off(FinishReason.EXPIRED)
        self._publisher.publish(generation.request_id, generation.epoch, last)
        self._request_log.note_end(generation, last)
        core_id = self._live.remove(generation.request_id)
        if core_id is not None:
            self._core.abort_requests([core_id])
        self.wake()

    def _refuse(self, claim: Claim, error: RequestError) -> None:
        delta = Delta(index=claim.num_logged_tokens, finish_reason=FinishReason.ERROR, error=error)
        self._publisher.publish(claim.request_id, claim.epoch, delta)
