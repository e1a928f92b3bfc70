"""Parsers of tool calls by name; the names are vLLM's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ....shared.errors import ValidationError
from ....shared.shown import shown
from .formats import HERMES, LLAMA3_JSON, MISTRAL, CallFormat


@dataclass(frozen=True)
class ToolCallStyle:
    """Style in which a family of models calls tools.

    Args:
        num_id_chars: length of a call's id after ``id_prefix``. Mistral's templates accept only ids of nine characters.
    """

    call_format: CallFormat
    id_prefix: str = "call_"
    num_id_chars: int = 24

    def call_id(self, request_id: str, choice: int, index: int) -> str:
        """Return the id of a call. It is the same whenever the same answer is parsed, so that a stream can be read
        again."""
        digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
        return self.id_prefix + digest[: self.num_id_chars]


HERMES_PARSER = "hermes"
DEFAULT_TOOL_CALL_PARSER = HERMES_PARSER
TOOL_CALL_PARSERS: dict[str, ToolCallStyle] = {
    HERMES_PARSER: ToolCallStyle(HERMES),
    "llama3_json": ToolCallStyle(LLAMA3_JSON),
    "mistral": ToolCallStyle(MISTRAL, id_prefix="", num_id_chars=9),
}


def find_tool_call_style(name: str) -> ToolCallStyle:
    """Return the style of that name.

    Raises:
        ValidationError: the name is unknown.
    """
    if name not in TOOL_CALL_PARSERS:
        names = ", ".join(sorted(TOOL_CALL_PARSERS))
        raise ValidationError(f"tool_call_parser must be one of {names}, got {shown(name)}")
    return TOOL_CALL_PARSERS[name]
