"""Who wrote to which log: no two owners in one, though they write the same tokens.

Engines compute a request alike, so two of them in one log leave no trace in its tokens. Here each claim and each record
that a server took is held against these rules:

- A claim gives an epoch above all that the request had, and to one engine alone.
- A record is written under the epoch that was given last.
- No token is written twice, by whomever.

What a server has lost, in a failover or otherwise, it may take again from whom it then calls the owner; so the last two
hold for one server, from its start on. An epoch is one engine's whatever was lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_SENTENCES = 100
UNSEEN = "an engine whose claim was not seen"


@dataclass
class _Log:
    """What one server has taken of a request. ``end`` is the index after the last token, ``by`` the epoch of that."""

    epoch: int = 0
    end: int = 0
    by: int = 0


@dataclass
class Owners:
    """Told of claims and records in the order in which servers took them.

    ``num_records`` that were seen; ``moved`` requests, that more than one epoch wrote to; ``harms``, one sentence each.
    """

    num_records: int = 0
    num_harms: int = 0
    harms: list[str] = field(default_factory=list)
    _writers: dict[str, set[int]] = field(default_factory=dict)
    _engines: dict[tuple[str, int], str] = field(default_factory=dict)
    _logs: dict[str, _Log] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Iterable[Owners]) -> Owners:
        """What was seen at several servers, each by itself."""
        whole = cls()
        for part in parts:
            whole.num_records += part.num_records
            whole.num_harms += part.num_harms
            whole.harms += part.harms
            for request_id, epochs in part._writers.items():
                whole._writers.setdefault(request_id, set()).update(epochs)
        return whole

    @property
    def num_moved(self) -> int:
        """How many requests more than one owner wrote to, one after the other."""
        return sum(len(epochs) > 1 for epochs in self._writers.values())

    def forget(self) -> None:
        """Another server takes over, or this one has lost what it held."""
        self._logs.clear()

    def claimed(self, request_id: str, epoch: int, engine: str) -> None:
        """An engine was given a request."""
        log = self._logs.setdefault(request_id, _Log())
        first = self._engines.setdefault((request_id, epoch), engine)
        if first != engine:
            self._complain(f"{request_id}: epoch {epoch} was given to {first} and again to {engine}")
        elif epoch <= log.epoch:
            self._complain(
                f"{request_id}: {engine} was given epoch {epoch}, not above that of {self._name(request_id, log.epoch)}"
            )
        log.epoch = max(log.epoch, epoch)

    def wrote(self, request_id: str, epoch: int, index: int, next_index: int) -> None:
        """A record with the tokens from ``index`` to before ``next_index`` went into the log."""
        log = self._logs.setdefault(request_id, _Log())
        self.num_records += 1
        self._writers.setdefault(request_id, set()).add(epoch)
        writer, tokens = self._name(request_id, epoch), _tokens(index, next_index)
        if epoch < log.epoch:
            self._complain(
                f"{request_id}: {tokens} written by {writer} after the request had gone to "
                f"{self._name(request_id, log.epoch)}"
            )
        elif index < log.end:
            self._complain(
                f"{request_id}: {tokens} written by {writer}, though {self._name(request_id, log.by)} had written "
                f"up to token {log.end - 1}"
            )
        log.epoch, log.end, log.by = max(log.epoch, epoch), max(log.end, next_index), epoch

    def _name(self, request_id: str, epoch: int) -> str:
        return f"{self._engines.get((request_id, epoch), UNSEEN)} (epoch {epoch})"

    def _complain(self, sentence: str) -> None:
        self.num_harms += 1
        if len(self.harms) < MAX_SENTENCES:
            self.harms.append(sentence)


def _tokens(index: int, next_index: int) -> str:
    if next_index - index > 1:
        return f"tokens {index} to {next_index - 1} were"
    return f"token {index} was" if next_index > index else f"the end after token {index - 1} was"
