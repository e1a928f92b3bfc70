"""A checked request for a response, stored or a row of a batch: its requests, and the conversion of its output."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from ....shared.errors import PenstockError
from ...inputs.options import RequestOptions
from ...results import RequestOutput, whole_delta
from ..answers.common import created_at, finish_reason_of
from ..chat import PreparedChat, prepare_chat
from ..errors import OpenAIError, bad_field, error_of
from ..parsers import Parsers
from ..prepared import Prepared
from .body import ResponseBody, chat_body, check_body, offered_tools, with_response_names
from .items import read_items
from .objects import Response
from .response_store import StoredResponse
from .transcriber import ParsingOptions, Transcriber

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
    "truncation",
    "user",
)


class PreparedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response's record, and its chat completion.

    Every reader of the response derives it from the record. ``options`` are set only for running it. ``is_reserved``:
    another call may create or read the same response.
    """

    record: StoredResponse
    chat: PreparedChat
    options: RequestOptions = msgspec.field(default_factory=RequestOptions)
    is_reserved: bool = False

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
            tools={tool.flat_name: tool for tool in offered_tools(self.record.body, self.record.conversation)},
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
        chat = prepare_chat(chat_body(record.body, record.conversation), record.parsers)
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
        tools=list(body.tools or ()),
        **echoed,
    )


class PreparedRow(Prepared, kw_only=True, frozen=True):
    """A response that is not stored, so it cannot be retrieved by its id."""

    id_prefix: str = "resp"
    record: StoredResponse
    chat: PreparedChat

    def answer(self, *outputs: RequestOutput, response_id: str | None = None) -> Response:
        """Return the response to one output; see ``Prepared.answer``."""
        (output,) = outputs
        (completion,) = output.outputs
        finish_reason_of(completion.finish_reason, has_output=bool(completion.token_ids))
        response_id = response_id or output.request_id
        record = msgspec.structs.replace(
            self.record, id=response_id, created_at=created_at(response_id), model=output.model
        )
        transcriber = PreparedResponse(record=record, chat=self.chat).transcriber()
        transcriber.create()
        transcriber.feed(whole_delta(output, completion))
        return transcriber.response


def prepare_row(body: ResponseBody, parsers: Parsers) -> PreparedRow:
    """Prepare a body that is independent of other requests.

    Raises:
        OpenAIError: 400, a field is invalid, or refers to other requests or a reader; it is named.
    """
    check_body(body)
    for name in ("previous_response_id", "background", "stream"):
        if getattr(body, name):
            raise bad_field(name, f"{name} must be left out of a row: rows are independent, and are not streamed")
    body = msgspec.structs.replace(body, store=False)
    # Id and model are unknown until there is output; the request does not depend on them.
    record = StoredResponse(
        id="resp_",
        created_at=0,
        model=body.model or "",
        body=msgspec.structs.replace(body, input=None),
        items=read_items(body.input, "resp_"),
        parsers=parsers,
    )
    chat = prepare_response(record).chat
    return PreparedRow(
        prompts=chat.prompts,
        params=chat.params,
        options=chat.options,
        stream=False,
        fields=chat.fields,
        record=record,
        chat=chat,
    )
