"""Write a message as events of Anthropic's Messages API, each with an id by which a client resumes the stream.

    msg_6921…:37          37 events and characters were sent; see ``MessageWriter``

A client sends the body again with the last id as ``Last-Event-ID``. The deltas are in Redis and are read from the first
one, because the content blocks follow from all of the text.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from ...shared.values.json_lines import encode_line
from ..anthropic.errors import messages_error
from ..anthropic.objects import Event, MessageStart
from ..anthropic.prepared import PreparedMessage
from ..openai.errors import OpenAIError
from ..sse import COMMENT
from .generations import PromptDelta
from .stream import check_stream_id

_FORM = re.compile(r"([A-Za-z0-9_-]{1,100}):(\d{1,15})")
# Anthropic's keep-alive. Clients of its API read it wherever it is.
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagePosition(msgspec.Struct, frozen=True):
    """Position of one stream: the number of its last event; 0 before the first."""

    response_id: str
    number: int = 0

    @property
    def next_indexes(self) -> list[int]:
        """Borders of the deltas: the number says where the reader is, wherever they are cut."""
        return [0]

    @classmethod
    def parse_event_id(cls, event_id: str, prepared: PreparedMessage, fingerprint: str) -> MessagePosition:
        """Read the ``Last-Event-ID`` of a request whose body has this ``fingerprint``.

        Raises:
            OpenAIError: 400, it is not the id of an event of such a stream, or another body started the stream.
        """
        match = _FORM.fullmatch(event_id)
        response_id = check_stream_id(match[1] if match else "", prepared.id_prefix, fingerprint)
        assert match is not None
        return cls(response_id, int(match[2]))


async def message_events(
    deltas: AsyncGenerator[PromptDelta], prepared: PreparedMessage, model: str, position: MessagePosition
) -> AsyncGenerator[bytes]:
    """Iterate over the encoded events of a stream that has reached ``position``; those of a delta form one piece."""
    response_id = position.response_id
    transcriber = prepared.transcriber(response_id, model, after=position.number)
    has_sent = False
    async with aclosing(deltas):
        with prepared.naming_fields():
            async for _, delta in deltas:
                pieces = [_frame(response_id, number, event) for number, event in transcriber.feed(delta)]
                if pieces:
                    has_sent = True
                    yield b"".join(pieces)
    if not has_sent:
        yield COMMENT  # the reader already had all events


def error_frame(request_id: str, error: OpenAIError) -> bytes:
    """Return the event that reports a failure. Nothing follows it."""
    return b"event: error\ndata: %b\n\n" % encode_line(messages_error(error, request_id))


def _frame(response_id: str, number: int, event: Event) -> bytes:
    kind = str(event.__struct_config__.tag).encode()
    frame = b"event: %b\nid: %b:%d\ndata: %b\n\n" % (kind, response_id.encode(), number, encode_line(event))
    return frame + PING if isinstance(event, MessageStart) else frame
