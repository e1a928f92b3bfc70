"""The messages of ``LLM.chat``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...shared.errors import ValidationError
from ...shared.values.shown import shown
from ..inputs.prompt import Prompt


def as_conversations(messages: Any) -> list[Prompt]:
    """Return one conversation or many as a list. Raises ``ValidationError`` if it is neither."""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        if messages and all(isinstance(message, Mapping) for message in messages):
            return [messages]
        for position, conversation in enumerate(messages):
            is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
            if not (is_list and conversation and all(isinstance(message, Mapping) for message in conversation)):
                raise ValidationError(
                    f"messages[{position}] must be a conversation, a list of messages, got {shown(conversation)}"
                )
        return list(messages)
    raise ValidationError(f"messages must be a conversation or a list of them, got {shown(messages)}")
