"""Contents of messages in the form that one chat template takes: text, or parts to go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...shared.params.chat_parts import is_parts, joined

Messages = list[dict[str, Any]]
Render = Callable[[Messages, dict[str, Any]], str]

_WORD = "probed"
# Tools' answers are text in every template that is known.
_PROBED_ROLES = ("system", "user", "assistant")


class Taken(NamedTuple):
    """What a template writes as it is meant."""

    text: bool = True
    parts: bool = False


class ContentForm:
    """How a template wants the contents of each role.

    Most write a content as it is, so that parts would come out in Python's notation; some go through parts, too; a few
    through nothing else, and a text would vanish. Some differ by role. It is found out by rendering, when it matters.

    Args:
        render: the template, of messages and other names; raises whatever it likes.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._found: dict[str, Taken] = {}

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return ``message``, whose content was checked, as the template wants it."""
        content, role = message.get("content"), message["role"]
        if is_parts(content):
            return message if self._taken(role).parts else {**message, "content": joined(content)}
        if isinstance(content, str) and not self._taken(role).text:
            return {**message, "content": _parts(content)}
        return message

    def _taken(self, role: str) -> Taken:
        if role not in _PROBED_ROLES:
            return Taken()
        taken = self._found.get(role)
        if taken is None:
            text, parts = self._shows(role, _WORD), self._shows(role, _parts(_WORD))
            # A template that wants other messages than these shows neither, and is most likely of the usual kind.
            taken = self._found[role] = Taken(text or not parts, parts)
        return taken

    def _shows(self, role: str, content: Any) -> bool:
        message = {"role": role, "content": content}
        if role != "user":
            said = self.apply({"role": "user", "content": "hi"})
            messages = [message, said] if role == "system" else [said, message]
        else:
            messages = [message]
        try:
            text = self._render(messages, {})
        except BaseException:  # whatever a template from the hub raises: it does not want this form
            return False
        return _WORD in text and "'type'" not in text and '"type"' not in text


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
