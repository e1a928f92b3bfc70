"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from ....shared.messages.deltas import Delta
from ....shared.messages.outcome import TokenLogprobs

# Returned by vLLM and OpenAI for a probability of zero, since JSON has no infinity.
LOWEST_LOGPROB = -9999.0


class TopLogprob(msgspec.Struct):
    """A token among the most probable ones of a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """An output token of a chat completion. ``bytes`` are its own, since a character may consist of several tokens."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The tokens of one choice, or of one chunk of it."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """The tokens of one choice of a completion. ``text_offset`` counts characters from the start of the choice."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(tokens: Sequence[TokenLogprobs], num_top: int) -> ChatLogprobs:
    """Return the log probabilities with the ``num_top`` most probable tokens of each position."""
    return ChatLogprobs([_chat_token(token, num_top) for token in tokens])


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], offsets: Sequence[int], *, first: tuple[int, bytes] | None = None
) -> CompletionLogprobs:
    """Return the log probabilities of tokens.

    Args:
        offsets: where the text of each token begins in the text of the choice, in characters.
        first: id and bytes of the first prompt token, if the prompt is echoed. It has no probability, since nothing
            precedes it.
    """
    logprobs = CompletionLogprobs([], [], [], list(offsets))
    if first is not None:
        _append(logprobs, _token_text(*first), None, None)
    for token in tokens:
        text = _token_text(token.token_id, own_bytes(token))
        # As in OpenAI's API, the token itself is listed even if it is not among the most probable ones.
        top = dict.fromkeys([text], _finite(token.logprob))
        top = {t.token: t.logprob for t in _top(token, len(token.top))} | top
        _append(logprobs, text, _finite(token.logprob), top)
    return logprobs


def prompt_offsets(tokens: Sequence[bytes], text: str) -> list[int]:
    """Return where the text of each token of a prompt begins in ``text``, in characters.

    A character of several tokens begins at the first of them. Tokens that are not in the text, such as the first one
    of most models, have no length, nor has a space that the tokenizer adds.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        piece = decoder.decode(token)
        for spelling in (piece, piece.removeprefix(" ")):
            if text.startswith(spelling, end):
                end += len(spelling)
                break
    return offsets


def output_offsets(delta: Delta, start: int) -> list[int]:
    """Return where the text of each token with log probabilities begins, if that of ``delta`` begins at ``start``."""
    # A delta without text has no ends, nor has one of a worker before 0.2.
    ends = delta.text_ends if len(delta.text_ends) == len(delta.token_ids) - 1 else [0] * (len(delta.token_ids) - 1)
    return [start + end for end in [0, *ends]][: len(delta.logprobs)]


def _append(logprobs: CompletionLogprobs, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
    logprobs.tokens.append(text)
    logprobs.token_logprobs.append(logprob)
    logprobs.top_logprobs.append(top)


def _chat_token(token: TokenLogprobs, num_top: int) -> TokenLogprob:
    data = own_bytes(token)
    return TokenLogprob(
        _token_text(token.token_id, data),
        _finite(token.logprob),
        None if data is None else list(data),
        _top(token, num_top),
    )


def _top(token: TokenLogprobs, num_top: int) -> list[TopLogprob]:
    top = []
    for position, (token_id, logprob) in enumerate(token.top[:num_top], start=1):
        data = token.texts[position] if position < len(token.texts) else None
        top.append(TopLogprob(_token_text(token_id, data), _finite(logprob), None if data is None else list(data)))
    return top


def own_bytes(token: TokenLogprobs) -> bytes | None:
    """Return the bytes of a token; None if the worker did not send them."""
    return token.texts[0] if token.texts else None


def _token_text(token_id: int, data: bytes | None) -> str:
    """Return the token's text, or vLLM's form of a bare id if the worker did not send it (``detokenize=False``)."""
    return f"token_id:{token_id}" if data is None else data.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
