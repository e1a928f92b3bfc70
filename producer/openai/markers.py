"""Split a stream's text before a possible marker."""

from __future__ import annotations


def safe_prefix_len(text: str, marker: str) -> int:
    """Return how many characters of ``text`` cannot be part of ``marker`` or of the whitespace before it."""
    longest = min(len(marker) - 1, len(text))
    num_held = next((num for num in range(longest, 0, -1) if text.endswith(marker[:num])), 0)
    return len(text[: len(text) - num_held].rstrip())
