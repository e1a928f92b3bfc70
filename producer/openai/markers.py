"""What of a stream's text may still become a marker."""

from __future__ import annotations


def len_of_certain(text: str, marker: str) -> int:
    """How much of ``text`` stands whatever comes: not what may begin ``marker``, nor the whitespace before that."""
    longest = min(len(marker) - 1, len(text))
    num_held = next((num for num in range(longest, 0, -1) if text.endswith(marker[:num])), 0)
    return len(text[: len(text) - num_held].rstrip())
