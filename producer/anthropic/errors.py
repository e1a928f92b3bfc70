"""Errors in the form of Anthropic's API, for the paths below ``MESSAGES``."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from ..openai.errors import OpenAIError

MESSAGES = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Claude Code reads both numbers of Anthropic's sentence, and then compacts its conversation.
_TOO_LONG = re.compile(r"prompt has (?:at least )?(\d+) tokens, but max_model_len(?: of .*?)? is (\d+)")


class ErrorDetail(msgspec.Struct):
    """An error; ``type`` is for programs."""

    type: str
    message: str


class MessagesError(msgspec.Struct, kw_only=True):
    """The body of every error response, and the data of an event of type "error"."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str | None = None


def is_messages_path(path: str) -> bool:
    """Return whether errors of ``path`` have Anthropic's form."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def messages_error(error: OpenAIError, request_id: str | None = None) -> MessagesError:
    """Return ``error`` in Anthropic's form."""
    message = error.message
    if error.error_code == "context_length_exceeded" and (match := _TOO_LONG.search(message)) is not None:
        message = f"prompt is too long: {match[1]} tokens > {match[2]} maximum"
    type_ = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return MessagesError(error=ErrorDetail(type_, message), request_id=request_id)


def error_body(path: str, error: OpenAIError, request_id: str | None = None) -> msgspec.Struct:
    """Return the body of an error response of ``path``, in the form of that path's API."""
    return messages_error(error, request_id) if is_messages_path(path) else error.body
