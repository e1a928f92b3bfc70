"""The claim loop: claims as many requests as the engine has capacity for, and passes them to the engine core.

If the model has several partitions, a round claims from one after the other while the engine has capacity.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import structlog

from ...shared.broker import SEQS_PER_KEPT_ONE, Claim, EngineCapacity, Wave
from ...shared.deployment.records import DeathCause
from ...shared.errors import PenstockError, RedisUnavailableError
from ...shared.messages.core import Ready
from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import FinishReason, RequestError
from ...shared.params.images import ImageInput
from ...shared.process.boundary import ends_task, unforeseen
from ...shared.process.waiting import wait_at_most
from ..config.worker_config import WorkerConfig
from .core.client import CoreClient
from .partitions.served_partitions import REDIS_PAUSE_S, ServedPartition, ServedPartitions
from .reporting.observers import RequestObserver
from .requests.generation import Generation, SegmentGeneration
from .requests.intake import Intake, UndecodableEntryError, ids_of
from .requests.running_generations import RunningGenerations
from .requests.segments import Segment

LEAVE_TIMEOUT_S = 1.0
# Repeated, because a claim that a paused Redis had in its socket may be carried out after a check.
CHECK_UNKNOWN_EVERY_S = 10.0

_NO_WAVE = Wave([])
# The log of a claimed request, or why it could not be read.
Log = list[Delta] | BaseException

log = structlog.get_logger()


class ClaimLoop:
    """Loop that claims waves until ``stop``. Its collaborators are shared with the ``WorkerService``.

    Attributes:
        is_admitting: whether it is preparing claimed requests, and not waiting for Redis.
    """

    def __init__(
        self,
        config: WorkerConfig,
        parts: ServedPartitions,
        core: CoreClient,
        live: RunningGenerations,
        observer: RequestObserver,
    ) -> None:
        self._observer = observer
        self._engine_id = config.engine_id
        self._lease_ttl_ms = config.lease_ttl_ms
        self.parts = parts
        self._core = core
        self._live = live
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._is_paused = False
        self.is_admitting = False
        self._claiming = asyncio.Lock()
        self._awaiting: set[asyncio.Task[None]] = set()

    def wake(self, _: object = None) -> None:
        """Start another round, because the queue was resumed or the engine has more capacity."""
        self._wake.set()

    def wake_at(self, part: ServedPartition) -> None:
        """Start another round, because a request for this engine arrived in ``part``."""
        part.is_woken = True
        self._wake.set()

    def stop(self) -> None:
        """Stop claiming. A claim in flight is still admitted, or its requests would belong to no engine."""
        self._is_stopping = True
        self._wake.set()

    async def leave(self) -> None:
        """Withdraw this engine's capacity from all partitions, so that none wakes it. Call after ``stop``.

        Tries only for ``LEAVE_TIMEOUT_S``, since Redis forgets the capacity without it too.
        """
        for task in self._awaiting:
            task.cancel()
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self.parts.withdraw()
        except (TimeoutError, RedisUnavailableError) as error:
            log.warning("capacity_not_withdrawn", error=str(error))

    async def pause(self) -> None:
        """Claim nothing until ``resume``. Returns once a claim in flight is admitted. A second call does nothing."""
        self._is_paused = True
        async with self._claiming:
            await self.parts.withdraw()

    def resume(self) -> None:
        """Claim again after ``pause``; otherwise do nothing."""
        self._is_paused = False
        self._wake.set()

    async def run(self, intake: Intake, ready: Ready) -> None:
        """Claim and admit until ``stop``."""
        while not self._is_stopping:
            self._wake.clear()
            for task in [task for task in self._awaiting if task.done()]:
                self._awaiting.discard(task)
                task.result()
            async with self._claiming:
                wait_s = await self._claim_round(intake, ready)
            if wait_s and not self._is_stopping:
                await wait_at_most(wait_s, self._wake.wait())

    async def _claim_round(self, intake: Intake, ready: Ready) -> float:
        """Claim from each partition in turn while the engine has capacity.

        Returns how many seconds to wait before the next round, 0 if more requests may be queued.
        """
        for part in self.parts:
            is_due = time.monotonic() - part.unknown_checked_at > CHECK_UNKNOWN_EVERY_S
            if (part.may_hold_unknown or is_due) and not part.is_away:
                await self._release_unknown(part)
        wait_s, may_claim_more = await self._claim_from(self.parts.homes(), intake, ready)
        if may_claim_more:
            others_wait_s, _ = await self._claim_from(await self.parts.others(), intake, ready)
            wait_s = min(wait_s, others_wait_s)
        if not self._has_capacity(ready):
            await self.parts.withdraw(also_homes=False)
        return wait_s

    async def _claim_from(self, parts: Sequence[ServedPartition], intake: Intake, ready: Ready) -> tuple[float, bool]:
        """Claim from each of ``parts`` while the engine has capacity.

        Returns the seconds to wait as ``_claim_round``, and whether to claim from other partitions too.
        """
        wait_s = _NO_WAVE.wait_s
        for part in parts:
            if not self._has_capacity(ready):
                return wait_s, False
            wave = await self._claim(part, ready)
            # A refused request leaves capacity free, of which Redis does not know.
            self.is_admitting = True
            # All at once, because after a death a wave has many requests to resume.
            logs = await asyncio.gather(*map(self._read_log, wave.claims), return_exceptions=True)
            num_admitted = 0
            for claim, logged in zip(wave.claims, logs, strict=True):
                num_admitted += await self._admit(claim, logged, intake, ready)
            self.is_admitting = False
            if num_admitted < len(wave.claims):
                return 0.0, False
            wait_s = min(wait_s, wave.wait_s)
            if wave.is_saving:
                return wait_s, False
        return wait_s, self._has_capacity(ready)

    def _has_capacity(self, ready: Ready) -> bool:
        return not (self._is_paused or len(self._live) >= ready.max_num_seqs or self._live.has_probationer)

    async def _claim(self, part: ServedPartition, ready: Ready) -> Wave:
        room = EngineCapacity(
            max_num_seqs=ready.max_num_seqs,
            num_seqs=len(self._live),
            num_kv_tokens=ready.kv_cache_size_tokens,
            num_held_kv_tokens=self._live.num_kv_tokens(ready.block_size),
            num_kept_seqs=ready.max_num_seqs // SEQS_PER_KEPT_ONE,
        )
        part.is_woken = False
        part.has_our_capacity = True
        try:
            async with asyncio.timeout(self.parts.patience_s):
                wave = await part.broker.claim(self._engine_id, room, lease_ttl_ms=self._lease_ttl_ms)
        except (TimeoutError, RedisUnavailableError) as error:
            log.warning("claim_failed", error=str(error))
            self._set_aside(part)
            return _NO_WAVE
        part.claimed_at = time.monotonic()
        return wave

    def _set_aside(self, part: ServedPartition) -> None:
        """Claim nothing from ``part`` until its Redis lists this engine's claims: the last one may have succeeded."""
        part.may_hold_unknown = True
        if not part.is_away:
            part.is_away = True
            self._awaiting.add(asyncio.create_task(self._await_answer(part)))

    async def _await_answer(self, part: ServedPartition) -> None:
        try:
            while True:
                await asyncio.sleep(REDIS_PAUSE_S)
                with suppress(RedisUnavailableError):  # the connection logs that Redis is away
                    await part.broker.claims(self._engine_id)
                    return
        finally:
            part.is_away = False
            self._wake.set()

    async def _release_unknown(self, part: ServedPartition) -> None:
        """Release the claims that Redis lists for this engine and that it does not know.

        They arise when the reply of a claim is lost, and when Redis restarts without its last second of writes: then
        it refuses appends to a log that is shorter than expected.
        """
        try:
            async with asyncio.timeout(self.parts.patience_s):
                listed = await part.broker.claims(self._engine_id)
                # Requests that ended here meanwhile are written now; before, they would look like unknown claims.
                await part.publisher.flush()
                running = set(self._live.claims(part.number))
                unknown = [claim for claim in listed if claim not in running]
                num_released = await part.broker.release(unknown) if unknown else 0
        except (TimeoutError, RedisUnavailableError) as error:
            log.warning("claim_failed", error=str(error))
            self._set_aside(part)
            return
        part.may_hold_unknown = False
        part.unknown_checked_at = time.monotonic()
        if num_released:
            log.warning("unknown_requests_handed_back", num_requests=num_released)

    async def _read_log(self, claim: Claim) -> list[Delta]:
        return await self.parts[claim.partition].broker.read_log(claim.request_id) if claim.num_logged_tokens else []

    async def _admit(self, claim: Claim, logged: Log, intake: Intake, ready: Ready) -> bool:
        """Pass a claimed request to the core, or an error to its caller. Returns whether the core has the request."""
        try:
            return await self._admit_or_refuse(claim, logged, intake, ready)
        except RedisUnavailableError as error:
            # Returned to the queue once Redis answers, since nothing is wrong with the request.
            log.warning("claim_failed", **ids_of(claim), error=str(error))
            self._set_aside(self.parts[claim.partition])
            return False

    async def _admit_or_refuse(self, claim: Claim, logged: Log, intake: Intake, ready: Ready) -> bool:
        """Do the work of ``_admit``.

        Raises:
            RedisUnavailableError: the log, input or images of the request could not be read.
        """
        try:
            segment = await self._segment(claim, logged, intake)
            images = await self._images(claim, segment.request.images)
            generation = await self._generation(claim, segment, intake, ready)
            self._hand_over(claim, segment, images, generation)
        except UndecodableEntryError as error:
            log.warning("request_undecodable", **ids_of(claim), error=str(error))
            cause = DeathCause(engine_id=self._engine_id, reason=str(error))
            await self.parts[claim.partition].broker.park(claim, cause, error.code, str(error))
            return False
        except RedisUnavailableError:
            raise
        except PenstockError as error:
            log.warning("request_refused", **ids_of(claim), code=error.code, error=str(error))
            self._refuse_claim(claim, error)
            return False
        except BaseException as error:  # a request must not end the process, since it would end the next engine too
            if ends_task(error):
                raise
            self._live.remove(claim.request_id)
            self._refuse_claim(claim, unforeseen(error, ids_of(claim)))
            return False
        return True

    def _hand_over(
        self, claim: Claim, segment: Segment, images: list[ImageInput] | None, generation: Generation
    ) -> None:
        """Pass a claimed request to the core, and schedule its expiry."""
        log.debug("request_claimed", **generation.ids, num_deliveries=claim.attempt)
        self._observer.record_begin(generation, segment.request)
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
                prompt=None,
                messages=None,
                chat_template_kwargs=None,
                images=images,
                output_token_ids=segment.output_token_ids or None,
            )
        )

    async def _segment(self, claim: Claim, logged: Log, intake: Intake) -> Segment:
        """Return the segment to generate under a claim; a request that is not resumable has one segment."""
        request = await intake.prepare(claim)
        if isinstance(logged, BaseException):
            raise logged
        if request.resumable:
            broker = self.parts[claim.partition].broker
            # A segment may have ended without a token.
            logged = logged or await broker.read_log(claim.request_id)
            return await intake.segment(request, await broker.input.read(claim.request_id), logged)
        return Segment(request, logged)

    async def _generation(self, claim: Claim, segment: Segment, intake: Intake, ready: Ready) -> Generation:
        """Return the text side of a claim. It decodes the output of earlier engines and the end of the prompt."""
        kind = SegmentGeneration if segment.request.resumable else Generation
        num_tokens = segment.request.num_prompt_tokens + len(segment.output_token_ids)
        return await intake.thread.run(lambda: kind(segment, intake.codec, claim, ready.weights_version), num_tokens)

    async def _images(self, claim: Claim, images: list[ImageInput] | None) -> list[ImageInput] | None:
        """Return the images of a request with their bytes."""
        if not images:
            return None
        digests = [image.digest for image in images]
        contents = await self.parts[claim.partition].broker.images(digests)
        return [ImageInput(digest, data) for digest, data in zip(digests, contents, strict=True)]

    def _expire(self, generation: Generation) -> None:
        """End a request whose deadline has passed while it runs here."""
        last = generation.cut_off(FinishReason.EXPIRED)
        publisher = self.parts[generation.partition].publisher
        publisher.publish(generation.request_id, generation.epoch, last)
        self._observer.record_end(generation, last)
        core_id = self._live.remove(generation.request_id)
        if core_id is not None:
            self._core.abort_requests([core_id])
        self.wake()

    def _refuse_claim(self, claim: Claim, error: PenstockError) -> None:
        reason = RequestError(error.code, str(error), error.retryable)
        delta = Delta(index=claim.num_logged_tokens, finish_reason=FinishReason.ERROR, error=reason)
        self.parts[claim.partition].publisher.publish(claim.request_id, claim.epoch, delta)
