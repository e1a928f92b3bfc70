"""What an engine still has of conversations whose last turn has ended, as far as running requests leave it room."""

from __future__ import annotations

from collections import OrderedDict

from .measures import Note

# As --block-size by default: only whole blocks are found.
BLOCK_TOKENS = 16


class PrefixCache:
    """Tokens by session; the one that was longest without a turn goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, int] = OrderedDict()

    def take(self, note: Note) -> int:
        """Return how many tokens of a prompt are here; its request holds them from now on. The last is computed."""
        kept = self._kept.pop(note.session, 0)
        return min(kept, note.num_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def keep(self, note: Note) -> None:
        """A turn has ended: what was computed of it stays."""
        if note.session:
            self._kept[note.session] = note.num_prompt + note.num_output

    def shrink(self, num_tokens: int) -> None:
        """Keep no more than so many."""
        total = sum(self._kept.values())
        while self._kept and total > num_tokens:
            total -= self._kept.popitem(last=False)[1]
