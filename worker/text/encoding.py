"""Tokenize a text, with truncation or without, and bound the number of its tokens from below.

``Tokenizer.encode`` holds the GIL (tokenizers 0.23), so a long text in a thread would still block the event loop. The
batch calls release it. Freeing an encoding that has the text of each token takes 140 ns per token with the GIL held;
one of ``encode_batch_fast`` takes 5 ns. The library's truncation is not used, because it is a setting of the tokenizer,
which all requests and threads share.
"""

from __future__ import annotations

import math
import os
from typing import Any

import msgspec
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE

from ...shared.errors import ValidationError
from ...shared.params.prompts import LEFT, Cut
from ...shared.process.boundary import Boundary
from .vocabulary import byte_alphabet

TOKENIZER_FAILED = "tokenizer_failed"

# A single text gains nothing from the threads of batch calls, and a process with threads cannot be forked safely. The
# library reads the variable at each call.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A composed character has at most four characters in its canonical decomposition (Unicode Standard Annex 15), and no
# decomposition is shorter than its text. So these normalizers shrink a text to a quarter at most.
_MAX_COMPOSED = 4
_COMPOSING = ("NFC", "NFKC")
# Normalizers that never reduce the number of characters.
_NEVER_SHRINKING = ("NFD", "NFKD", "Prepend", "ByteLevel")
_KEEPING_ALL = ("ByteLevel", "Digits", "Metaspace")
_NO_LIMIT = math.inf


def tokenizing() -> Boundary:
    """Return the error boundary for calls of a model's tokenizer."""
    return Boundary("tokenizer of the model", TOKENIZER_FAILED)


def encode(tokenizer: Tokenizer, text: str, other: str | None = None, *, add_special_tokens: bool = True) -> Encoding:
    """Return the tokens of ``text``, or of a pair of texts, without their offsets. Releases the GIL."""
    if other is not None:  # without a post-processor, the fast call does not distinguish the texts of a pair
        return tokenizer.encode_batch([(text, other)], add_special_tokens=add_special_tokens)[0]
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def max_chars_per_token(tokenizer: Tokenizer) -> float:
    """Return the largest number of characters that one token represents; infinite if unknown.

    It is known for a BPE tokenizer that has a token for every byte, if no part of the tokenizer drops characters.
    """
    normalizers = _parts(tokenizer.normalizer, "normalizers")
    pre_tokenizers = _parts(tokenizer.pre_tokenizer, "pretokenizers")
    if not _has_all_bytes(tokenizer, normalizers + pre_tokenizers) or not all(map(_keeps_all, pre_tokenizers)):
        return _NO_LIMIT
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return _NO_LIMIT  # such a token includes all whitespace next to it
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
    return longest * math.prod(map(_shrinks_to, normalizers))


def _has_all_bytes(tokenizer: Tokenizer, parts: list[dict[str, Any]]) -> bool:
    """Return whether every character becomes known tokens, so that none is dropped or merged into an unknown one."""
    model = tokenizer.model
    if not isinstance(model, BPE):
        return False
    if model.byte_fallback:
        return all(tokenizer.token_to_id(f"<0x{value:02X}>") is not None for value in range(256))
    is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
    return is_byte_level and all(tokenizer.token_to_id(char) is not None for char in byte_alphabet())


def _parts(part: Any, name: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or a pre-tokenizer, with the fields of ``tokenizer.json``."""
    if part is None:
        return []
    pending = [msgspec.json.decode(part.__getstate__())]
    parts: list[dict[str, Any]] = []
    while pending:
        item = pending.pop(0)
        if item["type"] == "Sequence":
            pending = item[name] + pending
        else:
            parts.append(item)
    return parts


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] in _KEEPING_ALL


def _shrinks_to(normalizer: dict[str, Any]) -> float:
    """Return the largest number of characters that become one."""
    kind = normalizer["type"]
    if kind in _COMPOSING:
        return _MAX_COMPOSED
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern is not None and len(pattern) <= len(normalizer["content"]) else _NO_LIMIT
    return 1 if kind in _NEVER_SHRINKING else _NO_LIMIT


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
    return token_ids[:start] + Cut(max_tokens, cut.side).apply(token_ids[start:end]) + token_ids[end:]


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
