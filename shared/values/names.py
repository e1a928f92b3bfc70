"""Valid names of models, tenants, namespaces and partitions, as parts of Redis keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from ..errors import ValidationError
from .shown import shown

DEFAULT_NAMESPACE = "penstock"
MAX_NAME_CHARS = 200
# Similarity of names below which a name is not suggested.
_LEAST_LIKENESS = 0.7


def check_name(field: str, value: object) -> str:
    """Return ``value`` if it can be part of a key.

    Raises:
        ValidationError: it is empty, too long, or holds a brace or a control character.
    """
    if not isinstance(value, str) or not value or len(value) > MAX_NAME_CHARS:
        raise ValidationError(f"{field} must be a string of 1 to {MAX_NAME_CHARS} characters, got {shown(value)}")
    if "{" in value or "}" in value or not value.isprintable():
        raise ValidationError(f"{field} must hold no braces or control characters, got {shown(value)}")
    return value


def partition_name(model: str, partition: int) -> str:
    """Return what keys, shards and moves call a partition; the first is called as the model."""
    return f"{model}#{partition}" if partition else model


def is_partition_name(name: str) -> bool:
    """Whether a partition of some model is called so, and no model may be."""
    return re.fullmatch(r".*#[1-9][0-9]*", name) is not None


def as_literal(text: str) -> str:
    """Return the pattern that matches these characters alone, for SCAN and ACLs."""
    return re.sub(r"([*?\[\]^\\-])", r"\\\1", text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question for a word that is none of the known ones; empty if it resembles none of them."""
    nearest = difflib.get_close_matches(word, sorted(known), n=1, cutoff=_LEAST_LIKENESS)
    return f"did you mean {nearest[0]}?" if nearest else ""
