"""Names of properties other than those that are listed, as a pattern of JSON's text.

xgrammar keeps a listed name from coming again among additional ones, but not when it is spelled with escapes: "\\u0061"
is "a", and its value would stand for that of "a". In this pattern a character has one spelling.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..charset import complement
from .patterns import ANY_CHARACTER_IN_JSON, in_json

# Each prefix of a listed name takes a rule of the grammar.
_MAX_PREFIXES = 300


def other_names(listed: Iterable[str]) -> str:
    """What is between the quotes of a name that is not in ``listed``.

    If all prefixes of these are too many, they are compared in their first characters, and what begins so is no other.
    """
    names = frozenset(listed)
    depth = max(map(len, names))
    while depth > 1 and len({name[:length] for name in names for length in range(1, depth + 1)}) > _MAX_PREFIXES:
        depth -= 1
    return _other(names, depth)


def _other(tails: frozenset[str], depth: int) -> str:
    """What is none of ``tails``, and begins with none if ``depth`` is 0."""
    heads = sorted({tail[0] for tail in tails if tail})
    alternatives = [f"{in_json(complement([(ord(head), ord(head)) for head in heads]), '')}{ANY_CHARACTER_IN_JSON}*"]
    for head in heads:
        written = in_json([(ord(head), ord(head))], "", is_needed=False)
        if depth and written:
            inner = frozenset(tail[1:] for tail in tails if tail[:1] == head)
            alternatives.append(written + _other(inner, depth - 1))
    may_end = "" not in tails and depth
    return f"(?:{'|'.join(alternatives)}){'?' if may_end else ''}"
