"""The steps of an engine in order, as a file, to fit a model of its speed."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..errors import ConfigurationError
from .engine import StepStats

SUFFIX = ".steps.jsonl"
_encoder = msgspec.json.Encoder()


class RecordedStep(msgspec.Struct, frozen=True, gc=False):
    """Time and counts of one step.

    Args:
        ended_s: by the host's monotonic clock, which all engines of a host share.
        took_s: from the end of the last step if it left requests, so including the time between steps.
    """

    ended_s: float
    took_s: float
    stats: StepStats


def encode_steps(steps: Iterable[RecordedStep]) -> bytes:
    """Return lines of JSON, one for each step."""
    return _encoder.encode_lines(steps)


def decode_steps(data: bytes) -> list[RecordedStep]:
    """Return the steps of a file. Raises ``ConfigurationError`` for other files; an incomplete last line is ignored."""
    whole = data[: data.rfind(b"\n") + 1]
    try:
        return msgspec.json.Decoder(RecordedStep).decode_lines(whole)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"this is no file of an engine's steps: {error}") from error
