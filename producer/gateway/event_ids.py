"""How far a stream has come, as the ``id:`` of its events says it and ``Last-Event-ID`` gives it back.

    chatcmpl-6921…:12          12 tokens of the only answer were told
    chatcmpl-6921…:12e.7       of two answers: the first has ended, after 12 tokens
    chatcmpl-6921…:12e.9e.u    and the usage was told as well

An event tells at most one delta, so an id is always the border of one, and the deltas are in Redis: whoever has them
and the id knows what was told and what was not, whichever process told it.
"""

from __future__ import annotations

import re

from ..openai.answers.response_ids import fingerprint_of
from ..openai.errors import OpenAIError
from ..results.answer_positions import AnswerPositions

_FORM = re.compile(r"([A-Za-z0-9_-]{1,100}):(\d{1,10}e?(?:\.\d{1,10}e?)*)(\.u)?")


class Position(AnswerPositions):
    """The position of one stream; answers are counted over prompts: ``n`` of the first, then ``n`` of the second."""

    def __init__(
        self, response_id: str, next_indexes: list[int], ended: list[bool], *, has_usage: bool = False
    ) -> None:
        super().__init__(next_indexes, ended)
        self.response_id = response_id
        self.has_usage = has_usage

    @classmethod
    def start(cls, response_id: str, num_answers: int) -> Position:
        """Nothing was told yet."""
        return cls(response_id, [0] * num_answers, [False] * num_answers)

    @classmethod
    def parse(cls, event_id: str, num_answers: int, id_prefix: str, fingerprint: str) -> Position:
        """Read ``Last-Event-ID``, sent with a body of ``num_answers`` and ``fingerprint``.

        Raises:
            OpenAIError: 400, it is no id of an event of such a stream, or of one that another body began.
        """
        match = _FORM.fullmatch(event_id)
        marks = match[2].split(".") if match else []
        if match is None or len(marks) != num_answers or not match[1].startswith(f"{id_prefix}-"):
            raise _refused("Last-Event-ID must be the id of an event of a stream that this same body began")
        if fingerprint_of(match[1]) not in ("", fingerprint):
            raise _refused(
                "Last-Event-ID is of a stream that another body began; send that body again, without a change, or "
                "leave the header out"
            )
        ended = [mark.endswith("e") for mark in marks]
        return cls(match[1], [int(mark.rstrip("e")) for mark in marks], ended, has_usage=match[3] is not None)

    def __str__(self) -> str:
        if len(self.ended) == 1:
            marks = f"{self.next_indexes[0]}{'e' if self.ended[0] else ''}"
        else:
            marks = ".".join(
                f"{index}e" if ended else str(index) for index, ended in zip(self.next_indexes, self.ended, strict=True)
            )
        return f"{self.response_id}:{marks}{'.u' if self.has_usage else ''}"


def _refused(message: str) -> OpenAIError:
    return OpenAIError(400, message, param="Last-Event-ID", code="invalid_last_event_id")
