"""Parts of the engine that can sleep: they release their memory, and nothing can be computed meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ....shared.control.engine import SleepState


class Sleepable(Protocol):
    """A part that holds much memory and can release it for a while."""

    def release(self, level: int) -> None:
        """Release the memory. Level 1 stores the contents elsewhere, level 2 drops them. May follow a lower level."""
        ...

    def restore(self) -> None:
        """Restore the memory and its contents. If that raises, the part still sleeps, and the call may be repeated."""
        ...


@dataclass
class SleepableCache:
    """The KV cache. Its contents are dropped at any level and computed again."""

    free: Callable[[], None]
    allocate: Callable[[], None]

    def release(self, level: int) -> None:
        self.free()

    def restore(self) -> None:
        try:
            self.allocate()
        except BaseException:
            self.free()  # since a part of it may have been allocated
            raise


class EngineSleep:
    """Puts parts to sleep and wakes them.

    Args:
        parts: by tag, in the order in which they wake up.
        on_awake: called when the last part is awake.
    """

    def __init__(self, parts: Mapping[str, Sleepable], on_awake: Callable[[], None] = lambda: None) -> None:
        self._parts = parts
        self._on_awake = on_awake
        self._levels = dict.fromkeys(parts, 0)

    @property
    def state(self) -> SleepState:
        """The deepest level, and the tags of the sleeping parts."""
        return SleepState(max(self._levels.values()), [tag for tag, level in self._levels.items() if level])

    def is_asleep(self, tag: str) -> bool:
        return self._levels[tag] > 0

    def sleep(self, level: int) -> None:
        """Put every part to sleep that is awake or sleeps at a lower level."""
        for tag, part in self._parts.items():
            if self._levels[tag] < level:
                part.release(level)
                self._levels[tag] = level

    def wake_up(self, tags: list[str] | None) -> None:
        """Wake the parts with these tags, or all for None. Parts that are awake stay as they are."""
        sleeping = [tag for tag, level in self._levels.items() if level]
        for tag in sleeping:
            if tags is None or tag in tags:
                self._parts[tag].restore()
                self._levels[tag] = 0
        if sleeping and not any(self._levels.values()):
            self._on_awake()
