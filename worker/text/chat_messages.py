"""Messages in the form that one chat template wants, of the several that templates are written for."""

from __future__ import annotations

import json
from typing import Any

from ...shared.params.chat_parts import check_messages
from .chat_content import ContentForm, Messages, Render

_KEY = "probed_argument"
_FUNCTION = {"name": "probed_function", "description": "probed", "parameters": {"type": "object", "properties": {}}}
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class MessageForm:
    """How a template wants contents, and the tool calls of an assistant's message.

    Most want arguments as an object, which they turn into JSON themselves, and no content; some concatenate arguments
    as text, or content. It is found out by rendering a call each way, the first time that it matters.

    Args:
        render: the template, of messages and other names; raises whatever it likes.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._content = ContentForm(render)
        self._found: tuple[bool, str | None] | None = None

    def apply(self, messages: Messages) -> Messages:
        """Return ``messages`` as the template wants them.

        Raises:
            ValidationError: one is none, or a part of a content is no text.
        """
        messages = [self._content.apply(message) for message in check_messages(messages)]
        messages = [self._of_message(message) if message["role"] == "assistant" else message for message in messages]
        return _without_none(messages)

    def _of_message(self, message: dict[str, Any]) -> dict[str, Any]:
        reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
        if reasoning is not None:  # templates read it under one name or another
            message = {**message, **dict.fromkeys(_REASONING_FIELDS, reasoning)}
        calls = message.get("tool_calls")
        if not calls or not isinstance(calls, list):
            return message
        wants_text, no_content = self._form()
        content = message.get("content")
        return {
            **message,
            "content": no_content if content is None else content,
            "tool_calls": [_of_call(call, wants_text=wants_text) for call in calls],
        }

    def _form(self) -> tuple[bool, str | None]:
        """Whether arguments are to be text, and what is to stand for no content."""
        if self._found is None:
            forms = ((False, None), (False, ""), (True, None), (True, ""))
            self._found = next((form for form in forms if self._fits(*form)), forms[0])
        return self._found

    def _fits(self, wants_text: bool, content: str | None) -> bool:
        arguments = {_KEY: "value"}
        function = {"name": "probed_function", "arguments": json.dumps(arguments) if wants_text else arguments}
        call = {"id": "a1b2c3d4e", "type": "function", "function": function}
        asked: Messages = [{"role": "user", "content": "probed"}]
        called = [*asked, {"role": "assistant", "content": content, "tool_calls": [call]}]
        names = {"tools": [{"type": "function", "function": _FUNCTION}]}
        try:
            before, text = self._render(asked, names), self._render(called, names)
        except BaseException:  # whatever a template from the hub raises: it does not want this form
            return False
        is_python, is_quoted_twice = f"'{_KEY}'" in text, f'\\"{_KEY}' in text
        shows_none = text.count("None") > before.count("None")
        return _KEY in text and not is_python and not is_quoted_twice and not shows_none


def _without_none(messages: Messages) -> Messages:
    """Drop keys whose value is None, as transformers does: templates ask whether there are ``tool_calls``, not which.

    A content stays, since DeepSeek's templates ask whether it is None.
    """
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"} for message in messages
    ]


def _of_call(call: Any, *, wants_text: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if wants_text and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not wants_text and isinstance(arguments, str):
        arguments = _parsed(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    """The object that they are as JSON. A model may have written what is none: then its own text."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
