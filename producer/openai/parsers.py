"""Choose the parsers of a model's tool calls and reasoning."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress

import msgspec

from ...shared.deployment.records import ModelCard
from ...shared.errors import ConfigurationError, PenstockError, ValidationError
from ...shared.params.answer_formats import REASONING_FORMATS
from ...shared.params.chat import AUTO, NONE
from ...shared.process.log import get_logger
from ..client import Client
from .reasoning import find_reasoning_format
from .tools.formats import DEFAULT_TOOL_CALL_PARSER, TOOL_CALL_PARSERS, find_tool_call_style

log = get_logger(__name__)

_NATIVE_BACKENDS = ("auto", "xgrammar")
_CACHE_TTL_S = 30.0
_MISSING_TTL_S = 1.0


class Parsers(msgspec.Struct, frozen=True):
    """Parsers by name, and facts of the model's card. With ``reasoning`` "none" the answer is left unchanged.

    ``thinks_before_grammar``: an answer with a grammar also starts with reasoning.
    ``takes_developer``: the chat template knows the role "developer".
    ``has_json_options``: the engine takes options for whitespace and properties with a grammar.
    ``has_structural_tags``: the engine takes structural tags. ``forces_natively``: it enforces those of every format.
    """

    tool_call: str = DEFAULT_TOOL_CALL_PARSER
    reasoning: str = NONE
    thinks_before_grammar: bool = False
    takes_developer: bool = False
    has_json_options: bool = True
    has_structural_tags: bool = True
    forces_natively: bool = False


class ParserChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The parsers of a deployment; "auto" selects those of the model's card.

    Raises:
        ConfigurationError: no parser has that name.
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
            raise ConfigurationError(f"{error}; or {AUTO!r}, to take that of the model's card") from error

    def for_model(self, card: ModelCard | None) -> Parsers:
        """Return the parsers for the model of ``card``; None is a model that no worker has served."""
        setup = None if card is None else card.setup
        tool_call = card.tool_call_parser if card is not None and self.tool_call == AUTO else self.tool_call
        reasoning = card.reasoning_parser if card is not None and self.reasoning == AUTO else self.reasoning
        return Parsers(
            # A newer worker may name a format that is unknown here.
            tool_call=tool_call if tool_call in TOOL_CALL_PARSERS else DEFAULT_TOOL_CALL_PARSER,
            reasoning=reasoning if reasoning in REASONING_FORMATS else NONE,
            thinks_before_grammar=card is not None and card.thinks_before_grammar,
            has_json_options=setup is None or setup.engine == "penstock",
            has_structural_tags=setup is None or setup.engine in ("penstock", "vllm"),
            forces_natively=setup is not None
            and setup.engine == "penstock"
            and setup.structured_outputs_backend in _NATIVE_BACKENDS,
            takes_developer=card is not None and card.takes_developer,
        )


class ModelParsers:
    """Selects the parsers of each served model by the cards of its workers.

    Args:
        default_model: model of bodies that name none.
    """

    def __init__(self, client: Client, choice: ParserChoice, *, default_model: str | None = None) -> None:
        self._client = client
        self._choice = choice
        self._default_model = default_model
        self._parsers: dict[str, Parsers] = {}
        self._read_at = -math.inf
        self._lock = asyncio.Lock()

    async def for_model(self, model: str | None) -> Parsers:
        """Return the parsers of the model that a body names, or of the only model if it names none.

        Cards are read again after 30 s, since a model may have a new template, and after 1 s if the model is not among
        them. An unknown model gets the default parsers.
        """
        name = model or self._default_model
        async with self._lock:
            age_s = time.monotonic() - self._read_at
            is_known = name in self._parsers or (name is None and len(self._parsers) == 1)
            if age_s > (_CACHE_TTL_S if is_known else _MISSING_TTL_S):
                cards = await self._client.models()
                before, self._parsers = self._parsers, {}
                for card in cards.values():
                    parsers = self._parsers[card.model] = self._choice.for_model(card)
                    if before.get(card.model) != parsers:
                        self._report(card, parsers)
                self._read_at = time.monotonic()
            if name is not None and name not in self._parsers:
                with suppress(PenstockError):  # its requests report the error
                    base = await self._client.resolve_model(name)
                    return self._parsers.get(base) or self._choice.for_model(None)
        if name is None and len(self._parsers) == 1:
            return next(iter(self._parsers.values()))
        return self._parsers.get(name or "") or self._choice.for_model(None)

    def _report(self, card: ModelCard, parsers: Parsers) -> None:
        is_known = parsers.tool_call in (card.tool_call_parser, self._choice.tool_call)
        source = card.tool_call_source if self._choice.tool_call == AUTO else "option"
        log.info(
            "answer_formats_selected",
            model=card.model,
            tool_calls=parsers.tool_call,
            reasoning=parsers.reasoning,
            is_tool_call_format_known=is_known,
            source=source,
        )
