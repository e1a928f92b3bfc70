"""Messages and their contents in the form that one chat template expects; templates differ."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ...shared.params.chat import check_messages, is_parts, joined
from .message_roles import Messages, Render, place_instructions, probe_roles

_KEY = "probed_argument"
_FUNCTION = {"name": "probed_function", "description": "probed", "parameters": {"type": "object", "properties": {}}}
_TOOLS = {"tools": [{"type": "function", "function": _FUNCTION}]}
_QUESTION: Messages = [{"role": "user", "content": "probed"}]
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

_WORD = "probed"
# Every known template expects a text as the result of a tool.
_PROBED_ROLES = ("system", "user", "assistant")


class MessageForm:
    """The form of messages that a template expects: roles, contents and tool calls.

    Most templates expect the arguments of a call as an object, which they convert to JSON, and no content. Some
    concatenate arguments or content as text. The form is determined by rendering a call in each form, when it is first
    needed. Arguments that are no JSON object stay text, unless the template iterates over them.

    Args:
        source: the template.
        render: renders messages and other names with the template; may raise any exception.

    Attributes:
        roles: places of instructions that the template renders.
    """

    def __init__(self, source: str, render: Render) -> None:
        self._render = render
        self._content = ContentForm(render)
        self._form: tuple[bool, str | None] | None = None
        self._takes_any_text: bool | None = None
        self.roles = probe_roles(source, self._render_text)

    def apply(self, messages: Messages) -> Messages:
        """Return ``messages`` in the form that the template expects.

        Raises:
            ValidationError: one is not a message, or a part of a content is not text.
        """
        messages = place_instructions(check_messages(messages), self.roles)
        messages = [self._content.apply(message) for message in messages]
        messages = [
            self._apply_to_reply(message) if message["role"] == "assistant" else message for message in messages
        ]
        return _without_none(messages)

    def _render_text(self, messages: Messages, names: dict[str, Any]) -> str:
        """Render messages with text as content."""
        return self._render([self._content.apply(message) for message in messages], names)

    def _apply_to_reply(self, message: dict[str, Any]) -> dict[str, Any]:
        reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
        if reasoning is not None:  # templates use different names for it
            message = {**message, **dict.fromkeys(_REASONING_FIELDS, reasoning)}
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, list):
            return message
        wants_text, no_content = self._call_form()
        content = message.get("content")
        return {
            **message,
            "content": no_content if content is None else content,
            "tool_calls": [self._convert_call(call, wants_text=wants_text) for call in calls],
        }

    def _convert_call(self, call: Any, *, wants_text: bool) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        arguments = function.get("arguments")
        if wants_text and isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not wants_text and isinstance(arguments, str):
            arguments = self._parsed(arguments)
        return {**call, "function": {**function, "arguments": arguments}}

    def _parsed(self, arguments: str) -> Any:
        """Return the object in JSON ``arguments``. If the model has not written one, return the text itself, or an
        object with the text for a template that iterates over arguments.
        """
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = arguments
        if isinstance(value, dict):
            return value
        if self._takes_any_text is None:
            self._takes_any_text = self._shows_call(_KEY, self._call_form()[1])
        if self._takes_any_text:
            return arguments
        return {} if value is None else {"arguments": arguments}

    def _shows_call(self, arguments: object, content: str | None) -> bool:
        """Return whether the template renders a call with these arguments, which contain ``_KEY``."""
        try:
            return _KEY in self._render_call(arguments, content)
        except BaseException:  # a template from the hub may raise anything if it does not support this form
            return False

    def _render_call(self, arguments: object, content: str | None) -> str:
        call = {
            "id": "a1b2c3d4e",
            "type": "function",
            "function": {"name": "probed_function", "arguments": arguments},
        }
        return self._render([*_QUESTION, {"role": "assistant", "content": content, "tool_calls": [call]}], _TOOLS)

    def _call_form(self) -> tuple[bool, str | None]:
        """Return whether arguments must be text, and the value for no content."""
        if self._form is None:
            forms = ((False, None), (False, ""), (True, None), (True, ""))
            self._form = next((form for form in forms if self._fits(*form)), forms[0])
        return self._form

    def _fits(self, wants_text: bool, content: str | None) -> bool:
        arguments = {_KEY: "value"}
        try:
            text_before = self._render(_QUESTION, _TOOLS)
            text = self._render_call(json.dumps(arguments) if wants_text else arguments, content)
        except BaseException:  # a template from the hub may raise anything if it does not support this form
            return False
        is_python, is_quoted_twice = f"'{_KEY}'" in text, f'\\"{_KEY}' in text
        shows_none = text.count("None") > text_before.count("None")
        return _KEY in text and not is_python and not is_quoted_twice and not shows_none


def _without_none(messages: Messages) -> Messages:
    """Drop keys whose value is None, as transformers does, since templates check whether ``tool_calls`` is present.

    The content stays, since DeepSeek's templates check whether it is None.
    """
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"} for message in messages
    ]


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
