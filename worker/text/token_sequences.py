"""Token sequences of strings: words that an output must not contain, and the marks around a model's thinking."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from ...shared.errors import ValidationError
from ...shared.params.chat import REASONING_MARKS
from ...shared.values.shown import shown


def bad_word_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Return the token sequences of ``words``: each word at the start of a text, and after a space.

    The second sequence is omitted if it ends with the first, which already forbids it. (vLLM omits it unless both have
    the same length: with "Hello" in two tokens, it allows " Hello" in one token.)

    Raises:
        ValidationError: a word has no tokens.
    """
    plain = [word.lstrip(" ") or word for word in words]
    encodings = tokenizer.encode_batch([*plain, *(f" {word}" for word in plain)], add_special_tokens=False)
    sequences = [encoding.ids for encoding in encodings]
    unique: dict[tuple[int, ...], None] = {}
    for word, alone, spaced in zip(words, sequences[: len(words)], sequences[len(words) :], strict=True):
        if not alone:
            raise ValidationError(f"bad_words contains {shown(word)}, for which this model's tokenizer has no tokens")
        unique[tuple(alone)] = None
        if spaced[-len(alone) :] != alone:
            unique[tuple(spaced)] = None
    return [list(sequence) for sequence in unique if sequence]


def find_marks(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return the marks around thinking that are both tokens of the vocabulary; None if no pair is."""
    return next(
        (marks for marks in REASONING_MARKS.values() if all(tokenizer.token_to_id(mark) is not None for mark in marks)),
        None,
    )


def find_think_token_ids(tokenizer: Tokenizer, reasoning_parser: str = "") -> tuple[int, int] | None:
    """Return the tokens that start and end thinking, of ``reasoning_parser`` if not empty.

    None if the vocabulary has no such pair.
    """
    marks = REASONING_MARKS[reasoning_parser] if reasoning_parser else find_marks(tokenizer)
    start, end = (None, None) if marks is None else map(tokenizer.token_to_id, marks)
    return None if start is None or end is None else (start, end)
