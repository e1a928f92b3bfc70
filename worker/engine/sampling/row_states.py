"""State kept between steps for rows of the batch with uncommon sampling parameters."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray


class RowState(Protocol):
    """State of one request."""

    def append(self, token_id: int) -> None:
        """Record the next output token."""
        ...


State = TypeVar("State", bound=RowState)


class RowStates(Generic[State]):
    """States by row. Usually empty and without cost, since few requests need one."""

    def __init__(self) -> None:
        self._rows: dict[int, State] = {}

    def forget_row(self, row: int) -> None:
        """Drop the state of ``row``, if it has one."""
        self._rows.pop(row, None)

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Record the next output token of each row, both ``[R]``."""
        if self._rows:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if row in self._rows:
                    self._rows[row].append(token_id)

    def _among(self, rows: NDArray[np.int64]) -> list[tuple[int, State]]:
        """Return the states of ``rows``, ``[R]``, each with its index; rows without a state are left out."""
        if not self._rows:
            return []
        return [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]
