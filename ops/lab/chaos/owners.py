"""Check that each log has one owner at a time.

Engines compute equal tokens, so two owners of one log leave no trace in its tokens. Each claim and each record that a
server executed is checked against these rules:

- A claim assigns an epoch above all earlier ones of the request, to exactly one engine.
- A record is written under the last assigned epoch.
- No token is written twice, by any engine.

After data loss, as in a failover, a server may accept lost records again from the owner that it then knows. So the last
two rules hold per server, since its start. An epoch belongs to one engine even across data loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_SENTENCES = 100
UNSEEN = "an engine whose claim was not seen"


@dataclass
class _Log:
    """State of a request's log at one server. ``end`` is the index after the last token, ``by`` its epoch."""

    epoch: int = 0
    end: int = 0
    by: int = 0


@dataclass
class Owners:
    """Checker of claims and records, reported in the order of their execution.

    ``num_records`` is the number of observed records. ``moved`` has the requests with records of several epochs,
    ``harms`` a sentence for each violation.
    """

    num_records: int = 0
    num_harms: int = 0
    harms: list[str] = field(default_factory=list)
    _writers: dict[str, set[int]] = field(default_factory=dict)
    _engines: dict[tuple[str, int], str] = field(default_factory=dict)
    _logs: dict[str, _Log] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Iterable[Owners]) -> Owners:
        """Return the combined results of several servers."""
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
        """Number of requests that several owners wrote to, one after the other."""
        return sum(len(epochs) > 1 for epochs in self._writers.values())

    def forget(self) -> None:
        """Forget the logs, because another server takes over, or this one has lost its data."""
        self._logs.clear()

    def claimed(self, request_id: str, epoch: int, engine: str) -> None:
        """Check that an engine may claim a request."""
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
        """Check a record with the tokens from ``index`` to before ``next_index``."""
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
