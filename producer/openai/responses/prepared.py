"""A checked request for a response: the requests of the client, and how its output becomes the response."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from ....shared.errors import PenstockError
from ...inputs.options import RequestOptions
from ..chat import PreparedChat, prepare_chat
from ..errors import OpenAIError, error_of
from .body import chat_body, with_response_names
from .objects import Response
from .record import StoredResponse
from .transcriber import ParsingOptions, Transcriber


class PreparedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response's record, and its chat completion.

    Every reader of the response derives it from the record. ``options`` are set only for running it.
    """

    record: StoredResponse
    chat: PreparedChat
    options: RequestOptions = msgspec.field(default_factory=RequestOptions)

    @property
    def tenant(self) -> str:
        """The tenant that the response is charged to."""
        return self.options.get("tenant") or "default"

    def transcriber(self, after: int = -1) -> Transcriber:
        """Return a transcriber that starts at the first delta, and omits the events up to number ``after``."""
        options = ParsingOptions(
            parser=self.chat.make_parser(),
            call_id=partial(self.chat.style.call_id, self.record.id, 0),
            name_fields=self.name_fields,
            num_top_logprobs=self.chat.num_top_logprobs,
        )
        return Transcriber(new_response(self.record), options, after=after)

    def name_fields(self, error: PenstockError) -> OpenAIError:
        """Return an error as the caller sees it, with the field names of the body of a response."""
        try:
            with self.chat.naming_fields():
                raise error
        except PenstockError as named:
            return with_response_names(error_of(named))


def prepare_response(record: StoredResponse) -> PreparedResponse:
    """Prepare a response from its record.

    Raises:
        OpenAIError: 400, a field is invalid; it has the name used in the body of a response.
    """
    try:
        chat = prepare_chat(chat_body(record.body, [*record.history, *record.items]), record.parsers)
    except (ValueError, OpenAIError) as error:
        # msgspec's errors and ValidationError are ValueErrors.
        raise with_response_names(error_of(error)) from error
    except RecursionError as error:
        raise OpenAIError(400, "the body is nested too deeply", code="invalid_json") from error
    return PreparedResponse(record=record, chat=chat)


def new_response(record: StoredResponse) -> Response:
    """Return the response before anything is generated."""
    body = record.body
    echoed: dict[str, Any] = {name: value for name in _ECHOED if (value := getattr(body, name)) is not None}
    text = msgspec.to_builtins(body.text) if body.text is not None else {}
    return Response(
        id=record.id,
        created_at=record.created_at,
        status="queued",
        model=body.model or record.model,
        text={"format": {"type": "text"}} | text,
        reasoning=None if body.reasoning is None else msgspec.to_builtins(body.reasoning),
        tools=[msgspec.to_builtins(tool) for tool in body.tools or ()],
        **echoed,
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
