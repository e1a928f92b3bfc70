"""Texts of which only so many tokens are kept.

Not by the library's own truncation, which is a setting of the whole tokenizer, shared by all requests and threads.
"""

from __future__ import annotations

from tokenizers import Encoding, Tokenizer

from ...shared.errors import ValidationError
from ...shared.params.tokenization import Cut


def encode_cut(tokenizer: Tokenizer, text: str, cut: Cut, *, add_special_tokens: bool) -> list[int]:
    """Return the token ids of ``text``, at most ``cut.num_tokens``, with those that the model expects around it.

    Raises:
        ValidationError: those leave no room for a token of the text.
    """
    num_special = tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
    encoded = tokenizer.encode(text, add_special_tokens=False)
    encoded.truncate(_room(cut, num_special, at_least=1), direction=cut.side)
    return tokenizer.post_process(encoded, None, add_special_tokens).ids


def encode_cut_pair(tokenizer: Tokenizer, text: str, other: str, cut: Cut) -> Encoding:
    """Return two texts as the model judges them together; the longer one is cut until both fit.

    Raises:
        ValidationError: there is no room for a token of each.
    """
    room = _room(cut, tokenizer.num_special_tokens_to_add(True), at_least=2)
    pair = [tokenizer.encode(one, add_special_tokens=False) for one in (text, other)]
    shorter, longer = sorted(pair, key=lambda encoded: len(encoded.ids))
    shorter.truncate(min(len(shorter.ids), room // 2), direction=cut.side)
    longer.truncate(room - len(shorter.ids), direction=cut.side)
    return tokenizer.post_process(pair[0], pair[1], True)


def _room(cut: Cut, num_special: int, *, at_least: int) -> int:
    room = cut.num_tokens - num_special
    if room < at_least:
        raise ValidationError(
            f"truncate_prompt_tokens must be at least {num_special + at_least}, since the model expects {num_special} "
            f"special tokens beside the text, got {cut.num_tokens}"
        )
    return room
