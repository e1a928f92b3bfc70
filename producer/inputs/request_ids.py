"""Ids that callers choose for their requests."""

from __future__ import annotations

import re

from ...shared.errors import ValidationError
from ...shared.values.names import check_name
from ...shared.values.shown import shown

# Between the id of a request and the number of an answer beyond its first.
SEPARATOR = "~"
_CHILD_ID = re.compile(rf".*{SEPARATOR}[1-9][0-9]*", re.DOTALL)


def is_child_id(request_id: str) -> bool:
    """Return whether this is the id of an answer beyond the first of some request."""
    return _CHILD_ID.fullmatch(request_id) is not None


def check_request_id(request_id: object) -> str:
    """Return ``request_id`` if a caller may choose it for a request.

    Raises:
        ValidationError: it cannot be part of a key, or is the id of a further answer of another request.
    """
    name = check_name("request_id", request_id)
    if is_child_id(name):
        raise ValidationError(
            f"request_id must not end in {SEPARATOR!r} and a number, by which further answers of a request are known, "
            f"got {shown(name)}"
        )
    return name
