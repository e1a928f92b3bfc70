"""Which model a caller means: the cards that workers have left in Redis."""

from __future__ import annotations

import math
import time

import msgspec

from ..shared.connection import CommandConnection
from ..shared.errors import UnknownModelError, ValidationError
from ..shared.keys import Keys, check_name
from ..shared.records import ModelCard
from ..shared.shown import shown

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
        self._cards: dict[str, ModelCard] = {}
        self._read_at = -math.inf

    async def read(self) -> dict[str, ModelCard]:
        """Return all cards, by model name."""
        cards = await self._connection.execute("HGETALL", self._keys.models())
        pairs = zip(cards[::2], cards[1::2], strict=True)
        self._read_at = time.monotonic()
        self._cards = {name.decode(): msgspec.json.decode(card, type=ModelCard) for name, card in pairs}
        return self._cards

    async def find(self, model: str | None) -> ModelCard:
        """Return the card of ``model``, of the default, or of the only one there is.

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
        if time.monotonic() - self._read_at < FRESH_S:
            # What was just read speaks for the many requests of a moment, unless it would be an error.
            if name is None and len(self._cards) == 1:
                return next(iter(self._cards.values()))
            if name is not None and self._wait_for_model:
                return ModelCard(model=name)
        if name is not None:
            check_name("model", name)
        cards = await self.read()
        if name is None:
            if len(cards) == 1:
                return next(iter(cards.values()))
            if not cards:
                raise UnknownModelError("no worker has served a model on this Redis yet; start one, or pass model=")
            raise ValidationError(f"model must be given: this Redis knows {', '.join(sorted(cards))}")
        if name in cards:
            return cards[name]
        if self._wait_for_model:
            return ModelCard(model=name)
        known = ", ".join(sorted(cards)) or "none"
        raise UnknownModelError(
            f"no worker has ever served model {shown(name)} on this Redis (known: {known}); check the name, start a "
            "worker, or connect with wait_for_model=True"
        )
