"""Responses that are rows of a batch: each stands alone, and is told once, when it is whole."""

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
    """A response that is not kept: nobody can ask for it by its id."""

    id_prefix: str = "resp"
    record: StoredResponse
    chat: PreparedChat

    def answer(self, *outputs: RequestOutput, response_id: str | None = None) -> Response:
        """As ``Prepared.answer``, of one output."""
        (output,) = outputs
        (whole,) = output.outputs
        finish_reason_of(whole.finish_reason, has_output=bool(whole.token_ids))
        response_id = response_id or output.request_id
        record = msgspec.structs.replace(
            self.record, id=response_id, created_at=created_at(response_id), model=output.model
        )
        transcriber = PreparedResponse(record=record, chat=self.chat).transcriber()
        transcriber.create()
        transcriber.take(
            Delta(
                token_ids=whole.token_ids,
                text=whole.text,
                finish_reason=whole.finish_reason,
                usage=output.usage,
                logprobs=whole.logprobs or [],
                stats=whole.stats,
            )
        )
        return transcriber.response


def prepare_row(body: ResponseBody, parsers: Parsers) -> PreparedRow:
    """Return what a body asks for that stands alone.

    Raises:
        OpenAIError: 400, a field is wrong, or says something of other requests or of its reader; it is named.
    """
    check_body(body)
    for name in ("previous_response_id", "background", "stream"):
        if getattr(body, name):
            raise bad_field(name, f"{name} must be left out of a row: it stands alone, and nobody listens to it")
    body = msgspec.structs.replace(body, store=False)
    # Its id and its model are known with its output; nothing of what is asked follows from them.
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
