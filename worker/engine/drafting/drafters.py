"""Drafters guess the next tokens of one request: from its grammar, a prediction, its own tokens, or other outputs.

``SharedTexts`` holds the output of former requests, kept separately for each tenant and cache salt.

As with the prefix cache, a client can measure whether a text was generated before, since it then comes faster. So texts
are never matched across tenants or salts.

``SuffixDrafter`` follows SuffixDecoding (Oliaro et al., arXiv:2411.04975): similar requests have similar answers,
especially those of agents. SuffixDecoding uses a tree of all suffixes; the chains of ``SuffixIndex`` suffice here, and
are cheap to forget.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from ...prediction import PredictionCursor
from ...suffix_index import SuffixIndex
from ..scheduling.request import Constraint, Request
from ..scheduling.scheduler_output import SchedulerOutput


class Drafter(Protocol):
    """Guesses the next tokens of one request. It may keep state about that request."""

    def draft(self, request: Request, room: int) -> list[int]:
        """Return at most ``room`` draft tokens for ``request``, an empty list if there is no guess; ``room`` is at
        least 1.
        """
        ...


MakeDrafters = Callable[[Request], Sequence[Drafter]]


def make_drafters(request: Request) -> list[Drafter]:
    """Return the drafters of ``request``. Earlier ones are asked first, since they are correct more often."""
    drafters: list[Drafter] = []
    if request.constraint is not None:
        drafters.append(ForcedTextDrafter(request.constraint))
    if request.prediction:
        drafters.append(PredictionDrafter(request.prediction))
    return [*drafters, NgramDrafter(request)]


class ForcedTextDrafter:
    """The ``Drafter`` for text that a request's grammar forces. How the model tokenizes the text is a guess."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def draft(self, request: Request, room: int) -> list[int]:
        return self._constraint.forced_tokens(room)


class NgramDrafter:
    """The ``Drafter`` that returns the tokens after the last occurrence of the request's latest tokens."""

    def __init__(self, request: Request) -> None:
        self._index = SuffixIndex(request.token_ids)

    def draft(self, request: Request, room: int) -> list[int]:
        token_ids = request.token_ids
        start = self._index.find(token_ids)
        if start is None:
            return []
        return continued(token_ids, start, room)


def continued(token_ids: list[int], start: int, room: int) -> list[int]:
    """Return ``room`` tokens from ``start`` on. A text that ends sooner is assumed to repeat itself."""
    tokens = token_ids[start : start + room]
    while len(tokens) < room:
        tokens += tokens[: room - len(tokens)]
    return tokens


class PredictionDrafter:
    """The ``Drafter`` that returns the tokens of a prediction after the output's position in it.

    Args:
        token_ids: tokens of the prediction.
    """

    def __init__(self, token_ids: list[int]) -> None:
        self._cursor = PredictionCursor(token_ids)
        self._num_read = 0

    def draft(self, request: Request, room: int) -> list[int]:
        output = request.token_ids[request.num_prompt_tokens + self._num_read :]
        self._num_read += len(output)
        self._cursor.follow(output)
        return self._cursor.following(room)


# Of all scopes together. A token takes some 250 bytes, most of them in the index.
MAX_TOKENS = 200_000
# Share of ``MAX_TOKENS`` that one scope may use, in two halves.
SHARE_OF_A_SCOPE = 0.25
# Length of the longest match to search. Longer than within one text, because many texts have the same beginning.
ENOUGH = 8
# Separates two texts; not a token.
_END = -1

Scope = tuple[str | None, ...]


class _Texts:
    """Concatenated texts and their suffix index."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.index = SuffixIndex(self.token_ids, ENOUGH)


class SharedTexts:
    """Output of requests by their scope; the oldest is forgotten.

    A scope has its texts in two halves: when the newer one is full, the older one is dropped. If all scopes together
    exceed the limit, the least recently used scopes are dropped.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._max_half = max(1, int(max_tokens * SHARE_OF_A_SCOPE) // 2)
        self._scopes: OrderedDict[Scope, list[_Texts]] = OrderedDict()
        self.num_tokens = 0

    def learn(self, scope: Scope, token_ids: list[int]) -> None:
        """Add a text; only the end of a very long one."""
        text = [*token_ids[1 - self._max_half :], _END] if self._max_half > 1 else []
        halves = self._scopes.setdefault(scope, [_Texts()])
        self._scopes.move_to_end(scope)
        if len(halves[-1].token_ids) + len(text) > self._max_half:
            halves.append(_Texts())
        for dropped in halves[:-2]:
            self.num_tokens -= len(dropped.token_ids)
        del halves[:-2]
        halves[-1].token_ids += text
        self.num_tokens += len(text)
        while self.num_tokens > self._max_tokens:
            _, dropped_halves = self._scopes.popitem(last=False)
            self.num_tokens -= sum(len(half.token_ids) for half in dropped_halves)

    def find(self, scope: Scope, tail: list[int], room: int) -> tuple[list[int], int]:
        """Return at most ``room`` tokens that followed the end of ``tail`` in a text of ``scope``, and the length of
        the match before them; an empty list and 0 without a match."""
        halves = self._scopes.get(scope)
        if halves is None:
            return [], 0
        self._scopes.move_to_end(scope)
        best: list[int] = []
        best_len = 0
        for half in reversed(halves):
            match = half.index.match(tail)
            if match is not None and match[1] > best_len:
                place, length = match
                following = half.token_ids[place : place + room]
                if _END in following:
                    following = following[: following.index(_END)]
                if following:
                    best, best_len = following, length
        return best, best_len

    def clear(self) -> None:
        """Forget all texts."""
        self._scopes.clear()
        self.num_tokens = 0


# A shorter match with another request's output is likely a coincidence.
_MIN_SHARED = 3


class SuffixDrafter:
    """The ``Drafter`` that matches a request's own tokens and the output of former requests of its scope."""

    def __init__(self, request: Request, texts: SharedTexts) -> None:
        self._own = SuffixIndex(request.token_ids, ENOUGH)
        self._texts = texts

    def draft(self, request: Request, room: int) -> list[int]:
        token_ids = request.token_ids
        own = self._own.match(token_ids)
        shared, length = self._texts.find(request.extra_keys, token_ids[-ENOUGH:], room)
        if length >= _MIN_SHARED and (own is None or length > own[1]):
            return shared
        return [] if own is None else continued(token_ids, own[0], room)


class SuffixMemory:
    """Implements ``speculation.Memory``: learns the output of finished requests after the last tokens of the prompt."""

    def __init__(self, texts: SharedTexts | None = None) -> None:
        self.texts = texts or SharedTexts()
        self._running: dict[str, Request] = {}

    def drafters_for(self, request: Request) -> list[Drafter]:
        """Return the drafters of ``drafter.make_drafters``, with the last one replaced by a ``SuffixDrafter``."""
        *surer, _ = make_drafters(request)
        return [*surer, SuffixDrafter(request, self.texts)]

    def observe(self, output: SchedulerOutput) -> None:
        """Learn the output of requests that ended since the last step."""
        for request_id in output.released_ids:
            request = self._running.pop(request_id, None)
            if request is not None and request.is_finished and request.num_output_tokens:
                self.texts.learn(request.extra_keys, request.token_ids[max(0, request.num_prompt_tokens - ENOUGH) :])
        for request in output.requests:
            self._running[request.request_id] = request

    def forget_texts(self) -> None:
        """Forget all texts."""
        self.texts.clear()
