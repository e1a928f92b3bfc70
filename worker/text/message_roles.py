"""Instructions of the caller, in messages of the roles "system" and "developer", as one chat template takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]
Render = Callable[[Messages, dict[str, Any]], str]

_OPEN, _CLOSE = "<system-reminder>", "</system-reminder>"
_TOOLS = [{"type": "function", "function": {"name": "probed_function", "parameters": {"type": "object"}}}]


class RoleSupport(NamedTuple):
    """Places of instructions that a template renders. Unknown templates get instructions as system messages."""

    system_first: bool = True
    system_anywhere: bool = True
    developer: bool = False


def probe_roles(source: str, render: Render) -> RoleSupport:
    """Return the places of instructions that the template ``source`` renders, with and without tools.

    Developer messages are kept only if the template names that role. A template that writes any name of a role would
    write this one, too, but its model has never read it.

    Args:
        render: renders messages and other names with the template; may raise any exception.
    """
    if not _renders(render, "user", "assistant", "user"):
        return RoleSupport()  # it fails, or writes only a part of each chat, so the probes show nothing
    return RoleSupport(
        system_first=_renders(render, "system", "user"),
        system_anywhere=_renders(render, "system", "user", "system", "user"),
        developer="developer" in source and _renders(render, "system", "user", "developer", "user"),
    )


def _renders(render: Render, *roles: str) -> bool:
    """Return whether the template writes messages of these roles in their order, and the third not as a reply."""
    messages = [{"role": role, "content": f"probed{i}."} for i, role in enumerate(roles)]
    as_reply = [{**message, "role": "assistant"} if i == 2 else message for i, message in enumerate(messages)]
    for names in ({}, {"tools": _TOOLS}):
        text = _try(render, messages, names)
        if text is None:
            return False
        places = [text.find(message["content"]) for message in messages]
        if min(places) < 0 or places != sorted(places):
            return False
        # A template without a branch for a role may write its messages as those of the model.
        if len(roles) > 2 and text == _try(render, as_reply, names):
            return False
    return True


def _try(render: Render, messages: Messages, names: dict[str, Any]) -> str | None:
    try:
        return render(messages, names)
    except BaseException:  # a template from the hub may raise anything if it does not support these roles
        return None


def place_instructions(messages: Messages, support: RoleSupport) -> Messages:
    """Return checked ``messages`` with instructions only where the template renders them.

    Every message keeps its place, so a conversation that grows keeps its prefix in the engine's cache. Instructions
    that the template refuses become text of a user message, between tags. The neighbouring user messages join it,
    because such templates often refuse two user messages in a row.
    """
    messages = [_renamed(message, support) for message in messages]
    if support.system_anywhere:
        return messages
    placed: Messages = []
    is_start, is_reminder = True, False  # of the conversation; the message before
    for message in messages:
        if message["role"] == "system":
            if is_start and support.system_first:
                _append_or_join(placed, message, joins=bool(placed))
            elif message.get("content"):
                reminder = {**message, "role": "user", "content": _tagged(message["content"])}
                _append_or_join(placed, reminder, joins=bool(placed) and placed[-1]["role"] == "user")
                is_start, is_reminder = False, True
            continue
        _append_or_join(placed, message, joins=is_reminder and message["role"] == "user")
        is_start = False
        is_reminder = is_reminder and message["role"] == "user"
    return placed


def _renamed(message: dict[str, Any], support: RoleSupport) -> dict[str, Any]:
    if message["role"] != "developer" or support.developer:
        return message
    return {**message, "role": "system"}


def _append_or_join(messages: Messages, message: dict[str, Any], *, joins: bool) -> None:
    """Append ``message``; with ``joins`` to the content of the last one."""
    if joins:
        messages[-1] = {**messages[-1], "content": _joined(messages[-1].get("content"), message.get("content"))}
    else:
        messages.append(message)


def _joined(content: Any, more: Any) -> Any:
    if isinstance(content, str) and isinstance(more, str):
        return f"{content}\n\n{more}"
    return [*_as_parts(content), *_as_parts(more)]


def _tagged(content: Any) -> Any:
    if isinstance(content, str):
        return f"{_OPEN}{content}{_CLOSE}"
    return [*_as_parts(_OPEN), *content, *_as_parts(_CLOSE)]


def _as_parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
