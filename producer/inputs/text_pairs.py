"""Pairs of texts to score, and their names in error messages."""

from __future__ import annotations

from collections.abc import Sequence

from ...shared.errors import ValidationError
from ...shared.values.shown import shown


def pairs_of(texts: str | Sequence[str], others: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs. Raises ``ValidationError`` if the numbers do not match, or a value is not text."""
    each, against = _texts_of("texts", texts), _texts_of("others", others)
    if len(each) == 1:
        each *= len(against)
    if len(each) != len(against) or not each:
        raise ValidationError(f"texts must be one, or as many as the others ({len(against)}), got {len(each)}")
    return list(zip(each, against, strict=True))


def _texts_of(name: str, value: object) -> list[str]:
    if isinstance(value, str):
        text_by_field: dict[str, object] = {name: value}
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        text_by_field = {f"{name}[{index}]": text for index, text in enumerate(value)}
    else:
        raise ValidationError(f"{name} must be a text or a list of texts, got {shown(value)}")
    for field, text in text_by_field.items():
        if not isinstance(text, str) or not text:
            raise ValidationError(f"{field} must be a text that is not empty, got {shown(text)}")
    return list(text_by_field.values())  # type: ignore[arg-type]  # checked above


def names_of_pairs(texts: str | Sequence[str], others: str | Sequence[str], num_pairs: int) -> list[tuple[str, str]]:
    """Return the names of the two texts of each pair: the argument, and the index in it if it is a list."""
    each, against = (
        [name] if isinstance(value, str) else [f"{name}[{index}]" for index in range(len(value))]
        for name, value in (("texts", texts), ("others", others))
    )
    return list(zip(each * num_pairs if len(each) == 1 else each, against, strict=True))
