"""A checked request for a response: what is asked of the client, and how what comes of it is told."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from ....shared.errors import PenstockError
from ...inputs.options import RequestOptions
from ..chat import PreparedChat, prepare_chat
from ..errors import OpenAIError, error_of
from .body import chat_body, named_as_here
from .objects import Response
from .record import StoredResponse
from .transcriber import Reading, Transcriber


class PreparedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What one request has become: its record, and the chat completion that it stands for.

    Made anew from the record by whoever reads the response; ``options`` are there for who runs it.
    """

    record: StoredResponse
    chat: PreparedChat
    options: RequestOptions = msgspec.field(default_factory=RequestOptions)

    @property
    def tenant(self) -> str:
        """On whose account it runs."""
        return self.options.get("tenant") or "default"

    def transcriber(self, after: int = -1) -> Transcriber:
        """Return what tells the response from its first delta on, leaving out the events up to number ``after``."""
        reading = Reading(
            parser=self.chat.make_parser(),
            call_id=partial(self.chat.style.call_id, self.record.id, 0),
            name_fields=self.name_fields,
            num_top_logprobs=self.chat.num_top_logprobs,
        )
        return Transcriber(new_response(self.record), reading, after=after)

    def name_fields(self, error: PenstockError) -> OpenAIError:
        """Return what the caller is told of an error, with the names that fields have in the body of a response."""
        try:
            with self.chat.naming_fields():
                raise error
        except PenstockError as named:
            return named_as_here(error_of(named))


def prepare_response(record: StoredResponse) -> PreparedResponse:
    """Return what is asked for.

    Raises:
        OpenAIError: 400, a field is wrong; it is named as it is in the body of a response.
    """
    try:
        chat = prepare_chat(chat_body(record.body, [*record.history, *record.items]), record.parsers)
    except (ValueError, OpenAIError) as error:
        # msgspec's errors and our ValidationError are ValueErrors.
        raise named_as_here(error_of(error)) from error
    except RecursionError as error:
        raise OpenAIError(400, "the body is nested too deep", code="invalid_json") from error
    return PreparedResponse(record=record, chat=chat)


def new_response(record: StoredResponse) -> Response:
    """Return the response as it is before anything was generated."""
    body = record.body
    said: dict[str, Any] = {name: value for name in _ECHOED if (value := getattr(body, name)) is not None}
    text = msgspec.to_builtins(body.text) if body.text is not None else {}
    return Response(
        id=record.id,
        created_at=record.created_at,
        status="queued",
        model=body.model or record.model,
        text={"format": {"type": "text"}} | text,
        reasoning=None if body.reasoning is None else msgspec.to_builtins(body.reasoning),
        tools=[msgspec.to_builtins(tool) for tool in body.tools or ()],
        **said,
    )


_ECHOED = (
    "background",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "store",
    "temperature",
    "tool_choice",
    "top_logprobs",
    "top_p",
    "user",
)
