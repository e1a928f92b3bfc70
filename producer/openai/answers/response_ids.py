"""Ids of responses, and what follows from one: when it was made, what its body and chunks begin with."""

from __future__ import annotations

import os
import time
from typing import TypedDict

# Which build answered; OpenAI's callers compare it to see whether answers to the same seed may differ.
SYSTEM_FINGERPRINT = "penstock"
# Of an id after its dash: time and chance; the fingerprint of a body.
_NUM_DIGITS, _NUM_FINGERPRINT_DIGITS = 32, 8


class ResponseHead(TypedDict):
    """What the bodies and the chunks of one response begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def response_head(response_id: str, model: str) -> ResponseHead:
    """Return it; ``created`` follows from the id."""
    created = created_at(response_id)
    return {"id": response_id, "created": created, "model": model, "system_fingerprint": SYSTEM_FINGERPRINT}


def new_id(prefix: str, fingerprint: str = "") -> str:
    """Return an id for a response: its first eight digits after the dash are when it was made (see ``created_at``).

    ``fingerprint`` stands at its end: eight digits that say which body asked for it, where that matters.
    """
    return f"{prefix}-{int(time.time()):08x}{os.urandom(12).hex()}{fingerprint}"


def fingerprint_of(response_id: str) -> str:
    """Return the fingerprint of the body that a response answers; empty if its id has none."""
    digits = response_id.partition("-")[2]
    return digits[_NUM_DIGITS:] if len(digits) == _NUM_DIGITS + _NUM_FINGERPRINT_DIGITS else ""


def created_at(response_id: str) -> int:
    """Return the Unix time at which ``new_id`` made an id; the time now of any other.

    So a stream that another process goes on with has the same ``created`` in every chunk.
    """
    _, _, digits = response_id.partition("-")
    try:
        has_time = len(digits) in (_NUM_DIGITS, _NUM_DIGITS + _NUM_FINGERPRINT_DIGITS)
        return int(digits[:8], 16) if has_time else int(time.time())
    except ValueError:
        return int(time.time())
