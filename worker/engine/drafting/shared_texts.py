"""Output of former requests, kept separately for each tenant and cache salt.

As with the prefix cache, a client can measure whether a text was generated before, since it then comes faster. So
texts are never matched across tenants or salts.
"""

from __future__ import annotations

from collections import OrderedDict

from ...suffix_index import SuffixIndex

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
