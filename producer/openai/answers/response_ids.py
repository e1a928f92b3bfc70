"""Ids of responses, and the values derived from them: creation time, and the head of bodies and chunks."""

from __future__ import annotations

import os
import time
from typing import TypedDict

# Build of the server. OpenAI's clients compare it to see whether answers to the same seed may differ.
SYSTEM_FINGERPRINT = "penstock"
# Number of digits after the dash: time and random part; fingerprint of a body.
_NUM_DIGITS, _NUM_FINGERPRINT_DIGITS = 32, 8


class ResponseHead(TypedDict):
    """The first fields of the bodies and chunks of one response."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def response_head(response_id: str, model: str) -> ResponseHead:
    """Return the head of a response; ``created`` is derived from the id."""
    created = created_at(response_id)
    return {"id": response_id, "created": created, "model": model, "system_fingerprint": SYSTEM_FINGERPRINT}


def new_id(prefix: str, fingerprint: str = "") -> str:
    """Return an id for a response. Its first eight digits after the dash are the creation time; see ``created_at``.

    ``fingerprint`` is appended: eight digits that identify the request's body, if needed.
    """
    return f"{prefix}-{int(time.time()):08x}{os.urandom(12).hex()}{fingerprint}"


def fingerprint_of(response_id: str) -> str:
    """Return the fingerprint of the body that a response belongs to; empty if its id has none."""
    digits = response_id.partition("-")[2]
    return digits[_NUM_DIGITS:] if len(digits) == _NUM_DIGITS + _NUM_FINGERPRINT_DIGITS else ""


def created_at(response_id: str) -> int:
    """Return the Unix time at which ``new_id`` created an id; the current time for any other id.

    So ``created`` is the same in every chunk, even if another process resumes the stream.
    """
    _, _, digits = response_id.partition("-")
    try:
        has_time = len(digits) in (_NUM_DIGITS, _NUM_DIGITS + _NUM_FINGERPRINT_DIGITS)
        return int(digits[:8], 16) if has_time else int(time.time())
    except ValueError:
        return int(time.time())
