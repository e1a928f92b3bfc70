"""Which model a caller means: the cards that workers have left in Redis."""

from __future__ import annotations

import math
import time

from ...shared.connection import CommandConnection
from ...shared.deployment.heartbeats import read_heartbeats
from ...shared.deployment.records import EngineHeartbeat, ModelCard
from ...shared.deployment.unreadable import UNREADABLE, decode_record
from ...shared.errors import UnknownModelError, ValidationError
from ...shared.keys import Keys
from ...shared.partitions import open_dead_letter, open_queue
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from .awaited_models import AwaitedModels, known_models
from .health import may_serve

FRESH_S = 1.0


class ModelCards:
    """The models that were ever served here, read again when an unknown name is asked for.

    Args:
        default: the model of calls that name none.
        wait_for_model: whether a name that was never served is taken all the same.
    """

    def __init__(self, connection: CommandConnection, keys: Keys, *, default: str | None, wait_for_model: bool) -> None:
        self._connection = connection
        self._keys = keys
        self._default = default
        self._wait_for_model = wait_for_model
        self._awaited = AwaitedModels(connection, keys)
        self._cards: dict[str, ModelCard] = {}
        # What calls that name none have meant when it was last read.
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
        """Return the name that is meant if no model is known of that name: it may be an adapter's. Else None."""
        name = model or self._default
        return name if isinstance(name, str) and name not in self._cards else None

    async def find(self, model: str | None) -> ModelCard:
        """Return the card of ``model``, of the default, or of the only one: that is known, or else that is served.

        Raises:
            UnknownModelError: no worker has ever served it, or any model.
            ValidationError: there are several to choose from, or it is no name.
        """
        name = model or self._default
        if name is not None and not isinstance(name, str):
            check_name("model", name)
        card = self._cards.get(name) if name else None
        if card is not None:
            return card
        is_fresh = time.monotonic() - self._read_at < FRESH_S
        # What was just read speaks for the many requests of a moment, unless it would be an error; and what was read
        # before that, while one of them reads it again.
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
        known = known_models(name, cards)
        raise UnknownModelError(
            f"no worker has ever served model {shown(name)} on this Redis ({known}); check the name, start a "
            "worker, or connect with wait_for_model=True"
        )

    async def record_awaited(self, model: str) -> None:
        """Write down that a request is going to be enqueued for ``model``, if no worker has served it yet."""
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
        """Take away the card of a model that nobody serves and nothing waits for; its next worker brings it again.

        Raises:
            UnknownModelError: there is no such card.
            ValidationError: the model is in use; says by what. Nothing was taken away.
        """
        key = self._keys.models()
        card = await self._connection.execute("HGET", key, model)
        if card is None:
            known = known_models(model, await self.read())
            raise UnknownModelError(f"no worker has ever served model {shown(model)} on this Redis ({known})")
        await self._check_unused(model)
        await self._connection.execute("HDEL", key, model)
        self._cards.pop(model, None)
        self._only = None
        try:
            # Whoever came between looking and taking found the card still there.
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
        """The card that is meant by a caller who names none."""
        if not cards:
            raise UnknownModelError("no worker has served a model on this Redis yet; start one, or pass model=")
        if len(cards) == 1:
            return next(iter(cards.values()))
        served = sorted({engine.model for engine in await self._engines()} & cards.keys())
        if len(served) == 1:
            return cards[served[0]]
        if served:
            raise ValidationError(f"model must be given: engines serve {', '.join(served)} on this Redis")
        raise ValidationError(
            f"model must be given: this Redis knows {', '.join(sorted(cards))}, and no engine serves one of them now; "
            "`penstock models --forget NAME` takes one away that is no longer wanted"
        )

    async def _engines(self) -> list[EngineHeartbeat]:
        """All that serve something, or are going to."""
        return [beat for beat in await read_heartbeats(self._connection.execute, self._keys) if may_serve(beat)]


def _card(model: str, data: bytes) -> ModelCard:
    """Return a card; of one that cannot be read what is known of a model that no worker has told of yet: its name.

    Requests are accepted for it, and checked by its workers.
    """
    return decode_record("model card", model, data, ModelCard) or ModelCard(model=model, architecture=UNREADABLE)
