"""Responses as rows of a batch: independent of each other, and written once, when complete."""

from __future__ import annotations

import msgspec

from ....shared.messages.deltas import Delta
from ...results.outputs import RequestOutput
from ..answers.ends import finish_reason_of
from ..answers.response_ids import created_at
from ..chat import PreparedChat
from ..errors import bad_field
from ..parsers import Parsers
from ..prepared import Prepared
from .body import ResponseBody, check_body
from .objects import Response
from .prepared import PreparedResponse, prepare_response
from .reading import read_items
from .record import StoredResponse


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
        transcriber.feed(
            Delta(
                token_ids=completion.token_ids,
                text=completion.text,
                finish_reason=completion.finish_reason,
                usage=output.usage,
                logprobs=completion.logprobs or [],
                stats=completion.stats,
            )
        )
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
