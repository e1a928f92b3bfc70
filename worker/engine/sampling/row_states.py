"""What is kept from step to step for those rows of the batch whose requests want something out of the ordinary."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray


class RowState(Protocol):
    """What one request has come to."""

    def append(self, token_id: int) -> None:
        """Note the next output token."""
        ...


State = TypeVar("State", bound=RowState)


class RowStates(Generic[State]):
    """A state for each such row. Most requests want nothing, and then this is empty and costs nothing."""

    def __init__(self) -> None:
        self._rows: dict[int, State] = {}

    def forget_row(self, row: int) -> None:
        """Drop the state of ``row``, if it has one."""
        self._rows.pop(row, None)

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Note one more output token of each row, both ``[R]``."""
        if self._rows:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if row in self._rows:
                    self._rows[row].append(token_id)

    def _among(self, rows: NDArray[np.int64]) -> list[tuple[int, State]]:
        """Those of ``rows``, ``[R]``, that have a state, by their index, with it."""
        if not self._rows:
            return []
        return [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]
