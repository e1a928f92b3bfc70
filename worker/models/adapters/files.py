"""The files of an adapter, which must not change between the computation of their digest and their reading."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....shared.errors import AdapterFileError
from ....shared.params.lora import ADAPTER_FILES, adapter_digest
from ....shared.values.shown import shown

# Inode, size and time of a file, which change when it is replaced or rewritten; None for a missing file.
_State = tuple[int, int, int] | None


@dataclass(frozen=True)
class AdapterFiles:
    """The files of an adapter in ``folder`` with this ``digest``."""

    folder: Path
    digest: str
    _states: list[_State]

    @classmethod
    def read(cls, folder: Path, digest: str) -> AdapterFiles:
        """Compute the digest.

        Args:
            digest: expected digest; "" for any.

        Raises:
            AdapterFileError: a file is missing or cannot be read, or contains another adapter.
        """
        states = _states_in(folder)
        actual = adapter_digest(folder)
        if digest and actual != digest:
            raise AdapterFileError(
                f"the adapter in {shown(str(folder))} is {actual[:12]}…, and the request is for {digest[:12]}…: its "
                f"files have been replaced; put those back, or send the request with the adapter's present name"
            )
        return cls(folder, actual, states)

    def check_unchanged(self) -> None:
        """Raise ``AdapterFileError`` if a file has changed since."""
        if _states_in(self.folder) != self._states:
            raise AdapterFileError(
                f"the adapter in {shown(str(self.folder))} changed while it was read; wait until it is written, and "
                "try again"
            )


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that can be assigned to a slot. ``prepared`` is its content, in the form that the slots take."""

    folder: Path
    digest: str
    rank: int
    prepared: Any


def _states_in(folder: Path) -> list[_State]:
    states: list[_State] = []
    for name in ADAPTER_FILES:
        try:
            stat = (folder / name).stat()
            states.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            states.append(None)
    return states
