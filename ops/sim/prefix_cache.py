"""Cached tokens of sessions whose last turn has ended, in the cache that running requests leave free."""

from __future__ import annotations

from collections import OrderedDict

from .measures import Note

# Default of --block-size: only whole blocks match.
BLOCK_TOKENS = 16


class PrefixCache:
    """Cached tokens by session. The least recently used session is evicted first."""

    def __init__(self) -> None:
        self._cached: OrderedDict[str, int] = OrderedDict()

    def take(self, note: Note) -> int:
        """Remove a session and return the cached tokens of a prompt. Its last token is always computed."""
        num_cached = self._cached.pop(note.session, 0)
        return min(num_cached, note.num_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def keep(self, note: Note) -> None:
        """Keep the computed tokens of a turn that has ended."""
        if note.session:
            self._cached[note.session] = note.num_prompt + note.num_output

    def shrink(self, num_tokens: int) -> None:
        """Evict sessions until at most ``num_tokens`` are cached."""
        total = sum(self._cached.values())
        while self._cached and total > num_tokens:
            total -= self._cached.popitem(last=False)[1]
