"""Find stop strings in text that arrives in pieces, and hold back only text that could become one."""

from __future__ import annotations


class StopStrings:
    """Finder of stop strings in one request's text.

    Invariant: text returned by ``add`` contains no stop string, and no prefix of one that may be completed.
    """

    def __init__(self, strings: list[str], *, include: bool) -> None:
        self._strings = strings
        self._include = include
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent, and the stop string that ended it; None if none did.

        Of several stop strings in the text, the one that begins first wins; of equal ones, the first in the list.
        """
        if not self._strings:
            return text, None
        self._held += text
        matches = [(self._held.find(s), i, s) for i, s in enumerate(self._strings) if s in self._held]
        if matches:
            at, _, string = min(matches)
            text = self._held[: at + len(string) if self._include else at]
            self._held = ""
            return text, string
        return self._pop_safe_prefix(), None

    def pass_over(self, text: str) -> str:
        """Return the text that may be sent. A stop string counts only if later text completes it."""
        self._held += text
        return self._pop_safe_prefix()

    def _pop_safe_prefix(self) -> str:
        num_held = max((_overlap(self._held, s) for s in self._strings), default=0)
        text = self._held[: len(self._held) - num_held]
        self._held = self._held[len(text) :]
        return text

    def flush(self) -> str:
        """Return the text that is held back; call at the end of the text."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest proper prefix of ``string`` with which ``text`` ends."""
    for length in range(min(len(string) - 1, len(text)), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
