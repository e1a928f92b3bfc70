"""Contents of messages in the form that one chat template supports: a text, or a list of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...shared.params.chat import is_parts, joined

Messages = list[dict[str, Any]]
Render = Callable[[Messages, dict[str, Any]], str]

_WORD = "probed"
# Every known template expects a text as the result of a tool.
_PROBED_ROLES = ("system", "user", "assistant")


class TemplateSupport(NamedTuple):
    """The forms of content that a template renders correctly."""

    text: bool = True
    parts: bool = False


class ContentForm:
    """The form of content that a template expects for each role.

    Most templates write a content as it is, so parts would appear in Python's notation. Some render parts too. A few
    render only parts, and a text would vanish. Some differ by role. The form is determined by rendering probes, when
    it is first needed.

    Args:
        render: renders messages and other names with the template; may raise any exception.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._support: dict[str, TemplateSupport] = {}

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return ``message``, whose content was checked, in the form that the template expects."""
        content, role = message.get("content"), message["role"]
        if is_parts(content):
            return message if self._support_of(role).parts else {**message, "content": joined(content)}
        if isinstance(content, str) and not self._support_of(role).text:
            return {**message, "content": _parts(content)}
        return message

    def _support_of(self, role: str) -> TemplateSupport:
        if role not in _PROBED_ROLES:
            return TemplateSupport()
        support = self._support.get(role)
        if support is None:
            text, parts = self._renders(role, _WORD), self._renders(role, _parts(_WORD))
            # A template that refuses these messages renders neither; most likely it expects a text.
            support = self._support[role] = TemplateSupport(text or not parts, parts)
        return support

    def _renders(self, role: str, content: Any) -> bool:
        message = {"role": role, "content": content}
        if role != "user":
            user_message = self.apply({"role": "user", "content": "hi"})
            messages = [message, user_message] if role == "system" else [user_message, message]
        else:
            messages = [message]
        try:
            text = self._render(messages, {})
        except BaseException:  # a template from the hub may raise anything if it does not support this form
            return False
        return _WORD in text and "'type'" not in text and '"type"' not in text


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
