"""Tokenize texts with truncation.

The library's truncation is not used, because it is a setting of the tokenizer, which all requests and threads share.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from ...shared.errors import ValidationError
from ...shared.params.prompts import LEFT, Cut
from .encoding import encode


def encode_cut(tokenizer: Tokenizer, text: str, cut: Cut, *, add_special_tokens: bool) -> list[int]:
    """Return the token ids of ``text``, at most ``cut.num_tokens`` including the special tokens around it.

    Raises:
        ValidationError: the special tokens leave no space for a token of the text.
    """
    num_special = tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
    max_tokens = _max_text_tokens(cut, num_special, at_least=1)
    encoded = encode(tokenizer, text, add_special_tokens=add_special_tokens)
    token_ids = encoded.ids
    start, end = _span(encoded.sequence_ids, 0)
    return token_ids[:start] + Cut(max_tokens, cut.side).of(token_ids[start:end]) + token_ids[end:]


def encode_cut_pair(tokenizer: Tokenizer, text: str, other: str, cut: Cut) -> tuple[list[int], list[int]]:
    """Return token ids and type ids of a pair of texts.

    The longer text is cut until both fit.

    Raises:
        ValidationError: the special tokens leave no space for a token of each text.
    """
    max_tokens = _max_text_tokens(cut, tokenizer.num_special_tokens_to_add(True), at_least=2)
    encoded = encode(tokenizer, text, other)
    sequence_ids = encoded.sequence_ids
    first, second = (range(*_span(sequence_ids, number)) for number in (0, 1))
    num_shorter = min(len(first), len(second), max_tokens // 2)
    num_longer = max_tokens - num_shorter
    is_first_shorter = len(first) <= len(second)
    kept_places = {
        *_ends(first, num_shorter if is_first_shorter else num_longer, cut.side),
        *_ends(second, num_longer if is_first_shorter else num_shorter, cut.side),
    }
    places = [place for place, number in enumerate(sequence_ids) if number is None or place in kept_places]
    token_ids, type_ids = encoded.ids, encoded.type_ids
    return [token_ids[place] for place in places], [type_ids[place] for place in places]


def _span(sequence_ids: list[int | None], number: int) -> tuple[int, int]:
    """Return where the tokens of text ``number`` begin and end; special tokens have no number."""
    if number not in sequence_ids:
        return 0, 0
    start = sequence_ids.index(number)
    return start, start + sequence_ids.count(number)


def _ends(places: range, num_tokens: int, side: str) -> range:
    """Return the first or the last ``num_tokens`` of ``places``; ``side`` is the side that is cut off."""
    num_tokens = min(num_tokens, len(places))
    return places[len(places) - num_tokens :] if side == LEFT else places[:num_tokens]


def _max_text_tokens(cut: Cut, num_special: int, *, at_least: int) -> int:
    max_tokens = cut.num_tokens - num_special
    if max_tokens < at_least:
        raise ValidationError(
            f"truncate_prompt_tokens must be at least {num_special + at_least}, since the model expects {num_special} "
            f"special tokens in addition to the text, got {cut.num_tokens}"
        )
    return max_tokens
