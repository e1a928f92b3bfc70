"""A cache of compiled grammars. It evicts the least recently used ones."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .grammar import CompiledGrammar
from .spec import GrammarSpec


class GrammarCache:
    """Maps specifications to compiled grammars. Compile threads write it and the step loop reads it."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._entries: OrderedDict[GrammarSpec, tuple[CompiledGrammar, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, spec: GrammarSpec) -> CompiledGrammar | None:
        with self._lock:
            entry = self._entries.get(spec)
            if entry is None:
                return None
            self._entries.move_to_end(spec)
            return entry[0]

    def put(self, spec: GrammarSpec, compiled: CompiledGrammar) -> None:
        """Store ``compiled`` unless it is larger than the whole cache."""
        num_bytes = compiled.num_bytes + len(spec.text)
        with self._lock:
            if spec in self._entries or num_bytes > self._max_bytes:
                return
            self._entries[spec] = (compiled, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes or len(self._entries) > self._max_entries:
                _, (_, freed) = self._entries.popitem(last=False)
                self.num_bytes -= freed
