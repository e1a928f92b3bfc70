"""Where the text of a request goes on that another engine has begun.

How far text has come after so many tokens depends on which of them were read at once: within a character nothing of
them is told, and records of the log are merged when Redis is slow. So who replays the tokens of the log may have come
less far than the log has, or further.
"""

from __future__ import annotations


class UntoldText:
    """What is to be told of a text of which two have told a beginning, the log and who replays it."""

    def __init__(self) -> None:
        self._replayed = ""
        self._num_logged = 0
        self._lacks_space = False

    def replay(self, text: str, logged: str) -> None:
        """Take in what the tokens of a record gave, and what the record says."""
        is_first = bool(logged) and not self._num_logged
        self._replayed += text
        self._num_logged += len(logged)
        # Release 0.1 left out the space with which the output of a SentencePiece model follows its prompt.
        if is_first and self._replayed.startswith(" ") and not logged.startswith(" "):
            self._lacks_space = True

    def take(self, text: str) -> str:
        """Return what is to be told once ``text`` has come: that behind what was logged."""
        if not self._num_logged and not self._replayed:
            return text
        come = self._replayed + text
        if self._lacks_space:
            come, self._lacks_space = come.removeprefix(" "), False
        told, self._num_logged = min(self._num_logged, len(come)), max(self._num_logged - len(come), 0)
        self._replayed = ""
        return come[told:]
