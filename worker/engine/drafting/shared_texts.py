"""What requests have said that belong together: those of one tenant and one salt, and of no others.

As with the prefix cache, who asks learns by the time that it takes whether something was said before. So nothing is
found across tenants or salts.
"""

from __future__ import annotations

from collections import OrderedDict

from ...suffix_index import SuffixIndex

# In all. A token takes some 250 bytes, most of them in the index.
MAX_TOKENS = 200_000
# Of that, what one scope may take, in two halves.
SHARE_OF_A_SCOPE = 0.25
# Longer matches are looked for than within one text: there is more that begins alike.
ENOUGH = 8
# Between two texts; no token.
_END = -1

Scope = tuple[str | None, ...]


class _Texts:
    """Texts one behind the other, and where in them is what."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.index = SuffixIndex(self.token_ids, ENOUGH)


class SharedTexts:
    """Output of requests by their scope, of which the oldest is forgotten.

    A scope has its texts in two halves: when the newer one is full, the older one goes. If all together are too much,
    the scopes go that were not used for the longest time.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._max_half = max(1, int(max_tokens * SHARE_OF_A_SCOPE) // 2)
        self._scopes: OrderedDict[Scope, list[_Texts]] = OrderedDict()
        self.num_tokens = 0

    def learn(self, scope: Scope, token_ids: list[int]) -> None:
        """Keep a text; of a very long one the end."""
        text = [*token_ids[1 - self._max_half :], _END] if self._max_half > 1 else []
        halves = self._scopes.setdefault(scope, [_Texts()])
        self._scopes.move_to_end(scope)
        if len(halves[-1].token_ids) + len(text) > self._max_half:
            halves.append(_Texts())
        for gone in halves[:-2]:
            self.num_tokens -= len(gone.token_ids)
        del halves[:-2]
        halves[-1].token_ids += text
        self.num_tokens += len(text)
        while self.num_tokens > self._max_tokens:
            _, gone = self._scopes.popitem(last=False)
            self.num_tokens -= sum(len(half.token_ids) for half in gone)

    def find(self, scope: Scope, tail: list[int], room: int) -> tuple[list[int], int]:
        """Return at most ``room`` tokens that followed the end of ``tail`` in a text of ``scope``, and how many tokens
        agreed before them; none and 0 if it was never said."""
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
                found = half.token_ids[place : place + room]
                if _END in found:
                    found = found[: found.index(_END)]
                if found:
                    best, best_len = found, length
        return best, best_len

    def clear(self) -> None:
        """Forget everything."""
        self._scopes.clear()
        self.num_tokens = 0
