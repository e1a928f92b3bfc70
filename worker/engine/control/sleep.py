"""Which parts of the engine sleep: they have given their memory back, and nothing can be computed meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ....shared.control.sleeping import SleepState


class Sleepable(Protocol):
    """Something that holds much memory and can do without for a while."""

    def release(self, level: int) -> None:
        """Give the memory back; level 1 keeps what is in it elsewhere, level 2 does not. May follow a lower level."""
        ...

    def restore(self) -> None:
        """Take the memory again, as it was. If that raises, it still sleeps, and may be tried again."""
        ...


@dataclass
class SleepableCache:
    """The KV cache. What is in it is never kept: it is computed again."""

    free: Callable[[], None]
    allocate: Callable[[], None]

    def release(self, level: int) -> None:
        self.free()

    def restore(self) -> None:
        try:
            self.allocate()
        except BaseException:
            self.free()  # what of it there was room for
            raise


class EngineSleep:
    """Puts parts to sleep and wakes them.

    Args:
        parts: by tag, in the order in which they wake up.
        on_awake: called when the last of them is back, for what needs them all.
    """

    def __init__(self, parts: Mapping[str, Sleepable], on_awake: Callable[[], None] = lambda: None) -> None:
        self._parts = parts
        self._on_awake = on_awake
        self._levels = dict.fromkeys(parts, 0)

    @property
    def state(self) -> SleepState:
        """The deepest level, and the tags of what sleeps."""
        return SleepState(max(self._levels.values()), [tag for tag, level in self._levels.items() if level])

    def is_asleep(self, tag: str) -> bool:
        return self._levels[tag] > 0

    def sleep(self, level: int) -> None:
        """Put every part to sleep that does not sleep so deeply yet."""
        for tag, part in self._parts.items():
            if self._levels[tag] < level:
                part.release(level)
                self._levels[tag] = level

    def wake_up(self, tags: list[str] | None) -> None:
        """Wake the parts of these tags, all when None; does nothing to those that are awake."""
        sleeping = [tag for tag, level in self._levels.items() if level]
        for tag in sleeping:
            if tags is None or tag in tags:
                self._parts[tag].restore()
                self._levels[tag] = 0
        if sleeping and not any(self._levels.values()):
            self._on_awake()
