"""Parts of the engine that can sleep: they release their memory, and nothing can be computed meanwhile."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from ....shared.control.engine import SleepState
from ....shared.errors import EngineCallError, PenstockError

log = structlog.get_logger(__name__)


class Sleepable(Protocol):
    """A part that holds much memory and can release it for a while."""

    def release(self, level: int) -> None:
        """Release the memory. Level 1 stores the contents elsewhere, level 2 drops them.

        May follow a lower level, or a ``restore`` that failed.
        """
        ...

    def restore(self) -> None:
        """Restore the memory and its contents. If that raises, some of it may be allocated until ``release``."""
        ...


@dataclass
class SleepableCache:
    """The KV cache. Its contents are dropped at any level and computed again."""

    free: Callable[[], None]
    allocate: Callable[[], None]

    def release(self, level: int) -> None:
        self.free()

    def restore(self) -> None:
        self.allocate()


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
        self._is_unchanged = False

    @property
    def state(self) -> SleepState:
        """The deepest level, and the tags of the sleeping parts."""
        return SleepState(max(self._levels.values()), [tag for tag, level in self._levels.items() if level])

    def is_asleep(self, tag: str) -> bool:
        return self._levels[tag] > 0

    def defer(self, tag: str) -> None:
        """Release a part that was not used yet, until it is woken up, which then takes nothing but its memory."""
        self._parts[tag].release(1)
        self._levels[tag] = 1
        self._is_unchanged = True

    def sleep(self, level: int) -> None:
        """Put every part to sleep that is awake or sleeps at a lower level."""
        self._is_unchanged = False
        for tag, part in self._parts.items():
            if self._levels[tag] < level:
                part.release(level)
                self._levels[tag] = level

    def wake_up(self, tags: list[str] | None) -> None:
        """Wake the parts with these tags, or all for None. Parts that are awake stay as they are.

        Raises:
            EngineCallError: the memory of a part, which the message names, could not be restored. All sleep as before.
            PenstockError: the same, if a part reports the reason itself, such as a missing file.
        """
        former = {tag: level for tag, level in self._levels.items() if level}
        waking = [tag for tag in former if tags is None or tag in tags]
        part = ""
        try:
            for part in waking:
                self._parts[part].restore()
                self._levels[part] = 0
            part = "the preparation to compute"
            if former and not any(self._levels.values()) and not self._is_unchanged:
                self._on_awake()
        except Exception as error:
            _clear_frames(error)
            for tag in waking:
                self._parts[tag].release(former[tag])
                self._levels[tag] = former[tag]
            log.warning("wake_up_failed", part=part, reason=str(error))
            if isinstance(error, PenstockError):
                raise
            raise EngineCallError(
                f"the engine still sleeps, because {part} could not be restored: {type(error).__name__}: {error}; "
                "wake it up again once the cause is removed"
            ) from error


def _clear_frames(error: BaseException | None) -> None:
    """Clear the variables of the functions that raised ``error``, because they refer to memory allocated so far."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
