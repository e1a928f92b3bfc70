"""Texts that are scored against others: who goes with whom, and what each is called in an error."""

from __future__ import annotations

from collections.abc import Sequence

from ...shared.errors import ValidationError
from ...shared.values.shown import shown


def pairs_of(texts: str | Sequence[str], others: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs. Raises ``ValidationError`` if the numbers do not fit, or one is no text."""
    each, against = _texts_of("texts", texts), _texts_of("others", others)
    if len(each) == 1:
        each *= len(against)
    if len(each) != len(against) or not each:
        raise ValidationError(f"texts must be one, or as many as the others ({len(against)}), got {len(each)}")
    return list(zip(each, against, strict=True))


def _texts_of(name: str, given: object) -> list[str]:
    if isinstance(given, str):
        named: dict[str, object] = {name: given}
    elif isinstance(given, Sequence) and not isinstance(given, bytes | bytearray):
        named = {f"{name}[{index}]": text for index, text in enumerate(given)}
    else:
        raise ValidationError(f"{name} must be a text or a list of texts, got {shown(given)}")
    for field, text in named.items():
        if not isinstance(text, str) or not text:
            raise ValidationError(f"{field} must be a text that is not empty, got {shown(text)}")
    return list(named.values())  # type: ignore[arg-type]  # as was checked


def names_of_pairs(texts: str | Sequence[str], others: str | Sequence[str], num_pairs: int) -> list[tuple[str, str]]:
    """Return what the two of each pair are called: by the argument, and the place in it if that is a list."""
    each, against = (
        [name] if isinstance(given, str) else [f"{name}[{index}]" for index in range(len(given))]
        for name, given in (("texts", texts), ("others", others))
    )
    return list(zip(each * num_pairs if len(each) == 1 else each, against, strict=True))
