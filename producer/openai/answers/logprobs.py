"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

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
    tokens: Sequence[TokenLogprobs], *, first: tuple[int, bytes] | None = None, offset: int = 0
) -> CompletionLogprobs:
    """Return the log probabilities of tokens whose text starts ``offset`` characters into the choice.

    Args:
        first: id and bytes of the first prompt token, if the prompt is echoed. It has no probability, since nothing
            precedes it.
    """
    logprobs = CompletionLogprobs([], [], [], [])
    if first is not None:
        _append(logprobs, _token_text(*first), None, None, offset)
        offset += len(logprobs.tokens[0])
    for token in tokens:
        text = _token_text(token.token_id, _own_bytes(token))
        # As in OpenAI's API, the token itself is listed even if it is not among the most probable ones.
        top = dict.fromkeys([text], _finite(token.logprob))
        top = {t.token: t.logprob for t in _top(token, len(token.top))} | top
        _append(logprobs, text, _finite(token.logprob), top, offset)
        offset += len(text)
    return logprobs


def num_chars(logprobs: CompletionLogprobs) -> int:
    """Return the number of characters of the tokens."""
    return sum(map(len, logprobs.tokens))


def _append(
    logprobs: CompletionLogprobs, text: str, logprob: float | None, top: dict[str, float] | None, offset: int
) -> None:
    logprobs.tokens.append(text)
    logprobs.token_logprobs.append(logprob)
    logprobs.top_logprobs.append(top)
    logprobs.text_offset.append(offset)


def _chat_token(token: TokenLogprobs, num_top: int) -> TokenLogprob:
    data = _own_bytes(token)
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


def _own_bytes(token: TokenLogprobs) -> bytes | None:
    return token.texts[0] if token.texts else None


def _token_text(token_id: int, data: bytes | None) -> str:
    """Return the token's text, or vLLM's form of a bare id if the worker did not send it (``detokenize=False``)."""
    return f"token_id:{token_id}" if data is None else data.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
