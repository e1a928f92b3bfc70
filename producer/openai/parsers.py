"""Which parsers read what a model writes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...shared.errors import ConfigurationError, ValidationError
from ...shared.records import ModelCard
from .reasoning import find_reasoning_format
from .tools.registry import DEFAULT_TOOL_CALL_PARSER, find_tool_call_style

AUTO, NONE = "auto", "none"


class Parsers(msgspec.Struct, frozen=True):
    """Parsers by name. A ``reasoning`` of "none" leaves an answer as it is."""

    tool_call: str = DEFAULT_TOOL_CALL_PARSER
    reasoning: str = NONE


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
        )

    def among(self, cards: Mapping[str, ModelCard], model: str | None) -> Parsers:
        """Return the parsers for the model that a body names, or for the only one if it names none."""
        if model is None and len(cards) == 1:
            return self.of(next(iter(cards.values())))
        return self.of(cards.get(model or ""))
