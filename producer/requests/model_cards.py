"""Models by name: cards that workers have written to Redis, and names that requests wait for without a card.

A client that enqueues for a name without a card records the name first, so that commands, pages and metrics find its
queue. A typo would otherwise wait unnoticed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterable

from redis.exceptions import NoPermissionError, RedisError

from ...shared.connection import CommandConnection
from ...shared.deployment.presence import read_heartbeats
from ...shared.deployment.records import UNREADABLE, EngineHeartbeat, ModelCard, decode_record
from ...shared.errors import PenstockError, UnknownModelError, ValidationError
from ...shared.keys import Keys
from ...shared.partitions import open_dead_letter, open_queue
from ...shared.process.log import get_logger
from ...shared.values.names import check_name, did_you_mean
from ...shared.values.shown import shown
from .health import may_serve

FRESH_S = 1.0


class ModelCards:
    """Cards of all models that were ever served, read again when an unknown name is requested.

    Args:
        default: model of calls that name none.
        wait_for_model: whether a name that was never served is accepted.
    """

    def __init__(self, connection: CommandConnection, keys: Keys, *, default: str | None, wait_for_model: bool) -> None:
        self._connection = connection
        self._keys = keys
        self._default = default
        self._wait_for_model = wait_for_model
        self._awaited = AwaitedModels(connection, keys)
        self._cards: dict[str, ModelCard] = {}
        # The model of calls that name none, as of the last read.
        self._only: ModelCard | None = None
        self._read_at = -math.inf
        self._is_refreshing = False

    async def read(self) -> dict[str, ModelCard]:
        """Return all cards, by model name."""
        cards = await self._connection.execute("HGETALL", self._keys.models())
        pairs = zip(cards[::2], cards[1::2], strict=True)
        self._read_at, self._only = time.monotonic(), None
        self._cards = {name.decode(): _card(name.decode(), card) for name, card in pairs}
        return self._cards

    def unknown_name(self, model: str | None) -> str | None:
        """Return the requested name if no model has it, because it may be that of an adapter. Otherwise None."""
        name = model or self._default
        return name if isinstance(name, str) and name not in self._cards else None

    async def find(self, model: str | None) -> ModelCard:
        """Return the card of ``model``, of the default, or of the only known or only served model.

        Raises:
            UnknownModelError: no worker has ever served it, or any model.
            ValidationError: several models could be meant, or the name is invalid.
        """
        name = model or self._default
        if name is not None and not isinstance(name, str):
            check_name("model", name)
        card = self._cards.get(name) if name else None
        if card is not None:
            return card
        is_fresh = time.monotonic() - self._read_at < FRESH_S
        # A recent result serves many simultaneous requests, unless it is an error. While one request reads it again,
        # the others use the previous result.
        if name is None and self._only is not None and (is_fresh or self._is_refreshing):
            return self._only
        if is_fresh and name is not None and self._wait_for_model:
            return ModelCard(model=name)
        if name is None:
            return await self._refresh_only()
        check_name("model", name)
        cards = await self.read()
        if name in cards:
            return cards[name]
        if self._wait_for_model:
            return ModelCard(model=name)
        names = known_models(name, cards)
        raise UnknownModelError(
            f"no worker has ever served model {shown(name)} on this Redis ({names}); check the name, or start a worker"
        )

    async def record_awaited(self, model: str) -> None:
        """Record that a request will be enqueued for ``model``, if no worker has served it yet."""
        if model not in self._cards:
            await self._awaited.record(model, self._cards)

    async def read_with_awaited(self) -> tuple[dict[str, ModelCard], list[str]]:
        """Return all cards, and the names without a card for which requests wait or run."""
        cards = await self.read()
        return cards, await self._awaited.read(cards.keys())

    async def _refresh_only(self) -> ModelCard:
        self._is_refreshing = True
        try:
            self._only = await self._find_only(await self.read())
            return self._only
        finally:
            self._is_refreshing = False

    async def forget(self, model: str) -> None:
        """Remove the card of a model that no engine serves and no request waits for. Its next worker writes it again.

        Raises:
            UnknownModelError: the model has no card.
            ValidationError: the model is in use; says by what. Nothing was removed.
        """
        key = self._keys.models()
        card = await self._connection.execute("HGET", key, model)
        if card is None:
            names = known_models(model, await self.read())
            raise UnknownModelError(f"no worker has ever served model {shown(model)} on this Redis ({names})")
        await self._check_unused(model)
        await self._connection.execute("SADD", self._keys.forgotten_models(), model)
        await self._connection.execute("HDEL", key, model)
        self._cards.pop(model, None)
        self._only = None
        try:
            # A request may have come between the check and the removal, when the card still existed.
            await self._check_unused(model)
        except ValidationError:
            await self._connection.execute("HSETNX", key, model, card)
            raise

    async def _check_unused(self, model: str) -> None:
        serving = [engine.engine_id for engine in await self._engines() if engine.model == model]
        stats = await (await open_queue(self._connection, self._keys, model)).stats()
        num_requests = stats.depth + stats.num_running + stats.num_awaiting_input
        num_parked = await (await open_dead_letter(self._connection, self._keys, model)).count()
        use = ""
        if serving:
            use = f"it is served by {', '.join(serving)}; drain that first"
        elif num_requests:
            use = f"{num_requests} of its requests wait or run; an engine that serves it would answer them"
        elif num_parked:
            use = f"{num_parked} of its requests are parked; see penstock dead list --model {model}"
        if use:
            raise ValidationError(f"model {shown(model)} cannot be forgotten: {use}")

    async def _find_only(self, cards: dict[str, ModelCard]) -> ModelCard:
        """Return the card for a caller that names no model."""
        if not cards:
            raise UnknownModelError("no worker has served a model on this Redis yet; start one, or name a model")
        if len(cards) == 1:
            return next(iter(cards.values()))
        served = sorted({engine.model for engine in await self._engines()} & cards.keys())
        if len(served) == 1:
            return cards[served[0]]
        if served:
            raise ValidationError(f"model must be given: engines serve {', '.join(served)} on this Redis")
        raise ValidationError(
            f"model must be given: this Redis knows {', '.join(sorted(cards))}, and no engine serves any of them now; "
            "remove unused ones with `penstock models --forget NAME`"
        )

    async def _engines(self) -> list[EngineHeartbeat]:
        """Return the engines that serve a model or will."""
        return [beat for beat in await read_heartbeats(self._connection.execute, self._keys) if may_serve(beat)]


def _card(model: str, data: bytes) -> ModelCard:
    """Return the decoded card. An unreadable card gives one with only the name, as of a model without a card.

    Requests for such a model are accepted, and its workers check them.
    """
    return decode_record("model card", model, data, ModelCard) or ModelCard(model=model, architecture=UNREADABLE)


RECORD_EVERY_S = 60.0
# A name whose queue is empty is removed after this time, which exceeds the interval at which clients record it again.
KEPT_S = 3600.0
# Limit to the newest names, in case a program generates names.
MAX_MODELS = 100
PATIENCE_S = 2.0

log = get_logger(__name__)


class AwaitedModels:
    """Names without a card. Redis stores them as a hash from name to the Unix time in seconds of the last recording."""

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._recorded_at: dict[str, float] = {}

    async def record(self, model: str, known: Iterable[str]) -> None:
        """Record and log a name before a request is enqueued for it; at most once in ``RECORD_EVERY_S``.

        Args:
            known: names that have cards, for the log.
        """
        now = time.monotonic()
        if now - self._recorded_at.get(model, -math.inf) < RECORD_EVERY_S:
            return
        self._recorded_at[model] = now
        log.warning("model_awaited", model=model, known=known_models(model, known))
        try:
            await self._connection.execute("HSET", self._keys.awaited_models(), model, f"{time.time():.3f}")
        except NoPermissionError as error:
            # A Redis user of an older version lacks the permission. The request is accepted anyway.
            log.warning("model_not_recorded", model=model, reason=str(error))

    async def read(self, known: Collection[str]) -> list[str]:
        """Return the names for which requests wait or run, sorted. Names that have a card by now are removed.

        Args:
            known: names that have cards.
        """
        fields = await self._connection.execute("HGETALL", self._keys.awaited_models())
        recorded = {name.decode(): float(at) for name, at in zip(fields[::2], fields[1::2], strict=True)}
        if served := sorted(recorded.keys() & set(known)):
            await self._remove(served)
        newest = sorted(recorded.keys() - set(known), key=recorded.__getitem__, reverse=True)[:MAX_MODELS]
        are_used = await asyncio.gather(*map(self._is_used, newest))
        used = {name for name, is_used in zip(newest, are_used, strict=True) if is_used}
        oldest = time.time() - KEPT_S
        for name in newest:
            if name not in used and recorded[name] < oldest:
                await self._remove([name])
                if await self._is_used(name):
                    # A request came between the two checks.
                    await self._connection.execute("HSET", self._keys.awaited_models(), name, f"{time.time():.3f}")
        return sorted(used)

    async def _is_used(self, model: str) -> bool:
        """Return whether a request waits or runs. True if unknown, because the Redis of the queue may be away."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                stats = await (await open_queue(self._connection, self._keys, model)).stats()
        except (TimeoutError, PenstockError, RedisError):
            return True
        return bool(stats.depth or stats.num_running or stats.num_awaiting_input)

    async def _remove(self, names: list[str]) -> None:
        try:
            await self._connection.execute("HDEL", self._keys.awaited_models(), *names)
        except RedisError as error:
            log.debug("model_not_recorded", model=names[0], reason=str(error))


def known_models(model: str, known: Iterable[str]) -> str:
    """Return which models are known, and the likely name if ``model`` may be a typo."""
    names = sorted(known)
    hint = did_you_mean(model, names)
    return f"known models: {', '.join(names) or 'none'}" + (f"; {hint}" if hint else "")
