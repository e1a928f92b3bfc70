"""Which parsers read what a model writes."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress

import msgspec

from ...shared.deployment.records import ModelCard
from ...shared.errors import ConfigurationError, PenstockError, ValidationError
from ...shared.params.reasoning import AUTO, NONE
from ..client import Client
from .reasoning import find_reasoning_format
from .tools.registry import DEFAULT_TOOL_CALL_PARSER, find_tool_call_style

_KNOWN_FOR_S = 30.0
_UNKNOWN_FOR_S = 1.0


class Parsers(msgspec.Struct, frozen=True):
    """Parsers by name. A ``reasoning`` of "none" leaves an answer as it is.

    ``thinks_before_grammar`` says that an answer with a grammar has reasoning before it, too.
    """

    tool_call: str = DEFAULT_TOOL_CALL_PARSER
    reasoning: str = NONE
    thinks_before_grammar: bool = False


class ParserChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which parsers a deployment wants; "auto" are those that fit the model's chat template, by its card.

    Raises:
        ConfigurationError: there is no parser of that name.
    """

    tool_call: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        try:
            if self.tool_call != AUTO:
                find_tool_call_style(self.tool_call)
            if self.reasoning not in (AUTO, NONE):
                find_reasoning_format(self.reasoning)
        except ValidationError as error:
            raise ConfigurationError(f"{error}; or {AUTO!r}, what the model's chat template shows") from error

    def of(self, card: ModelCard | None) -> Parsers:
        """Return the parsers for the model of ``card``; None is a model that nobody has served."""
        tool_call = card.tool_call_parser if card is not None and self.tool_call == AUTO else self.tool_call
        reasoning = card.reasoning_parser if card is not None and self.reasoning == AUTO else self.reasoning
        return Parsers(
            tool_call=DEFAULT_TOOL_CALL_PARSER if tool_call in (AUTO, "") else tool_call,
            reasoning=NONE if reasoning in (AUTO, "") else reasoning,
            thinks_before_grammar=card is not None and card.thinks_before_grammar,
        )


class ModelParsers:
    """Which parsers read the answers of each model that is served, by the cards of its workers.

    Args:
        default_model: of bodies that name none.
    """

    def __init__(self, client: Client, choice: ParserChoice, *, default_model: str | None = None) -> None:
        self._client = client
        self._choice = choice
        self._default_model = default_model
        self._found: dict[str, Parsers] = {}
        self._read_at = -math.inf
        self._reading = asyncio.Lock()

    async def find(self, model: str | None) -> Parsers:
        """Return the parsers for the model that a body names, or for the only one if it names none.

        Cards are read again after a while, since a model may have got another template, and soon for one that is not
        known; for that there are the defaults.
        """
        name = model or self._default_model
        async with self._reading:
            age_s = time.monotonic() - self._read_at
            is_known = name in self._found or (name is None and len(self._found) == 1)
            if age_s > (_KNOWN_FOR_S if is_known else _UNKNOWN_FOR_S):
                cards = await self._client.models()
                self._found = {card.model: self._choice.of(card) for card in cards.values()}
                self._read_at = time.monotonic()
            if name is not None and name not in self._found:
                with suppress(PenstockError):  # requests of it will say what is wrong
                    base = (await self._client.handle("-", model=name)).model
                    return self._found.get(base) or self._choice.of(None)
        if name is None and len(self._found) == 1:
            return next(iter(self._found.values()))
        return self._found.get(name or "") or self._choice.of(None)
