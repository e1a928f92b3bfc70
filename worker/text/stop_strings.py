"""Find stop strings in text that comes in pieces, and hold back no more than could become one."""

from __future__ import annotations


class StopStrings:
    """Watches one request's text.

    Invariant: text let out by ``add`` never holds a stop string, nor a beginning of one that the next piece could
    complete.
    """

    def __init__(self, strings: list[str], *, include: bool) -> None:
        self._strings = strings
        self._include = include
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown, and the stop string that ended it, if one did.

        Of several stop strings, the one that begins first wins; of those, the first given.
        """
        if not self._strings:
            return text, None
        self._held += text
        found = [(self._held.find(s), i, s) for i, s in enumerate(self._strings) if s in self._held]
        if found:
            at, _, string = min(found)
            shown = self._held[: at + len(string) if self._include else at]
            self._held = ""
            return shown, string
        return self._take_certain(), None

    def pass_over(self, text: str) -> str:
        """Return the text that may be shown. A stop string counts only if text that comes later completes it."""
        self._held += text
        return self._take_certain()

    def _take_certain(self) -> str:
        keep = max((_overlap(self._held, s) for s in self._strings), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def flush(self) -> str:
        """Return what is held back, when no more text will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Length of the longest proper beginning of ``string`` that ``text`` ends with."""
    for length in range(min(len(string) - 1, len(text)), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
