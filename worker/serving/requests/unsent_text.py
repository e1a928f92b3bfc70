"""Find where the text of a request continues that another engine has begun.

The text after a number of tokens depends on which of them were decoded together: within a character no text is sent,
and records of the log are merged when Redis is slow. So an engine that replays the logged tokens may get less text than
the log contains, or more.
"""

from __future__ import annotations


class UnsentText:
    """Text of a request that is not in the log yet, computed from the logged text and the replayed one."""

    def __init__(self) -> None:
        self._replayed = ""
        self._num_logged = 0
        self._lacks_space = False

    def replay(self, text: str, logged: str) -> None:
        """Process a record of the log: the ``text`` that its tokens decode to here, and its ``logged`` text."""
        is_first = bool(logged) and not self._num_logged
        self._replayed += text
        self._num_logged += len(logged)
        # Release 0.1 omitted the space with which the output of a SentencePiece model follows its prompt.
        if is_first and self._replayed.startswith(" ") and not logged.startswith(" "):
            self._lacks_space = True

    def add(self, text: str) -> str:
        """Append ``text`` and return the part of the text that follows the logged text."""
        if not self._num_logged and not self._replayed:
            return text
        text = self._replayed + text
        if self._lacks_space:
            text, self._lacks_space = text.removeprefix(" "), False
        num_sent, self._num_logged = min(self._num_logged, len(text)), max(self._num_logged - len(text), 0)
        self._replayed = ""
        return text[num_sent:]
