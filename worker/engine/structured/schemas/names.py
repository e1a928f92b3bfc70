"""A pattern of JSON text that matches property names other than the listed ones.

xgrammar does not let a listed name occur again as an additional property, unless it is spelled with escapes: "\\u0061"
is "a", and its value would replace that of "a". In this pattern each character has exactly one spelling.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..charset import complement
from .patterns import ANY_CHARACTER_IN_JSON, in_json

# Each prefix of a listed name needs a rule in the grammar.
_MAX_PREFIXES = 300


def other_names(listed: Iterable[str]) -> str:
    """Return a pattern for the text between the quotes of a name that is not in ``listed``.

    If the listed names have too many prefixes, only their first characters are compared. The pattern then excludes
    every name that begins with these characters.
    """
    names = frozenset(listed)
    depth = max(map(len, names))
    while depth > 1 and len({name[:length] for name in names for length in range(1, depth + 1)}) > _MAX_PREFIXES:
        depth -= 1
    return _other_pattern(names, depth)


def _other_pattern(tails: frozenset[str], depth: int) -> str:
    """Return a pattern for text that differs from all ``tails`` and, if ``depth`` is 0, begins with none of them."""
    heads = sorted({tail[0] for tail in tails if tail})
    alternatives = [f"{in_json(complement([(ord(head), ord(head)) for head in heads]), '')}{ANY_CHARACTER_IN_JSON}*"]
    for head in heads:
        head_pattern = in_json([(ord(head), ord(head))], "", is_needed=False)
        if depth and head_pattern:
            inner = frozenset(tail[1:] for tail in tails if tail[:1] == head)
            alternatives.append(head_pattern + _other_pattern(inner, depth - 1))
    may_end = "" not in tails and depth
    return f"(?:{'|'.join(alternatives)}){'?' if may_end else ''}"
