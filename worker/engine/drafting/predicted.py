"""Drafts from the output that the caller predicted."""

from __future__ import annotations

from ...prediction import PredictionCursor
from ..scheduling.request import Request


class PredictionDrafter:
    """The ``drafter.Drafter`` that returns the tokens of a prediction after the output's position in it.

    Args:
        token_ids: tokens of the prediction.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self._cursor = PredictionCursor(token_ids)
        self._num_read = 0

    def draft(self, request: Request, room: int) -> list[int]:
        output = request.token_ids[request.num_prompt_tokens + self._num_read :]
        self._num_read += len(output)
        self._cursor.follow(output)
        return self._cursor.following(room)
