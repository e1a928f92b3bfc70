"""Detects damage of requests outside of the scripts; ``damage.lua`` does so within them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from redis.exceptions import ResponseError

from ..errors import DamagedRecordError
from ..values.shown import shown

WRONG_TYPE = "WRONGTYPE"


@contextmanager
def refusing_damage(request_id: str, part: str) -> Iterator[None]:
    """Raise ``DamagedRecordError`` if the part of a request that is read is not as the scripts wrote it."""
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(request_id, part, error) from error
    except ResponseError as error:
        if WRONG_TYPE not in str(error):
            raise
        raise _damaged(request_id, part, error) from error


def _damaged(request_id: str, part: str, error: Exception) -> DamagedRecordError:
    return DamagedRecordError(
        f"the {part} of request {shown(request_id)} in Redis was damaged from outside ({str(error)[:200]}); send the "
        "request again, and find out what else writes to this Redis"
    )
