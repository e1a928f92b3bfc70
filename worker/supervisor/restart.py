"""Policy of restarts: when a dead engine is started again, and when it is given up. Reads a clock, starts nothing.

    STARTING ──ready──▶ SERVING ──death──▶ DOWN ──delay over──▶ RESTARTING ──ready──▶ SERVING
                                            ▲ └───────◀──────death──┘ │
                                            └── crash loop: GIVEN_UP ◀┘        LEFT: stopped, from any phase

Two rows of deaths are counted separately.

*Deaths in a row* set the delay. The first restart has none, because most deaths are single. A process that served for a
while ends the row. A serving engine that was killed from outside does not lengthen it, because it was healthy. Nor does
a sleeping one, because its next process loads nothing until it is woken up.

*Deaths without a token*, in which the engine generated nothing and no external cause is known, set the limit: more
starts would not help, and each may cost a request one of its deliveries.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

import msgspec

from ...shared.process.children import STABLE_AFTER_S, restart_delay_s

# Poison requests are parked after a few deaths, so a healthy engine gets past two of them before this.
CRASH_LOOP_LIMIT = 8


class Phase(enum.StrEnum):
    """Phase of a supervised engine."""

    STARTING = "starting"
    SERVING = "serving"
    DOWN = "down"
    RESTARTING = "restarting"
    GIVEN_UP = "given_up"
    LEFT = "left"
    # Without a process until its model is needed: only on a device that several models share.
    PARKED = "parked"


NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    # Down before it has served: an engine that joins a running deployment.
    Phase.STARTING: frozenset({Phase.SERVING, Phase.DOWN, Phase.GIVEN_UP, Phase.LEFT, Phase.PARKED}),
    Phase.SERVING: frozenset({Phase.DOWN, Phase.GIVEN_UP, Phase.LEFT, Phase.PARKED}),
    Phase.DOWN: frozenset({Phase.RESTARTING, Phase.LEFT}),
    Phase.RESTARTING: frozenset({Phase.SERVING, Phase.DOWN, Phase.GIVEN_UP, Phase.LEFT, Phase.PARKED}),
    Phase.PARKED: frozenset({Phase.STARTING, Phase.LEFT}),
    Phase.GIVEN_UP: frozenset(),
    Phase.LEFT: frozenset(),
}


class Death(msgspec.Struct, frozen=True):
    """End of one process of an engine.

    Args:
        reason: a phrase for people.
        is_external: whether the cause was outside, so neither the engine nor its requests are to blame.
        num_tokens: number of tokens that this process generated.
        was_asleep: whether the engine slept, so that its next process sleeps, too.
        trace: its traceback; empty if it left none.
        code: code of the error that it reported; empty if it reported none.
    """

    reason: str
    is_external: bool = False
    num_tokens: int = 0
    trace: str = ""
    was_asleep: bool = False
    code: str = ""


class RestartPolicy:
    """Phase of one engine, and its rows of deaths.

    Attributes:
        phase: changed only by the methods, along ``NEXT_PHASES``.
        num_restarts: number of restarts.
        num_barren_deaths: deaths in a row without a token; ``CRASH_LOOP_LIMIT`` of them lead to ``GIVEN_UP``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, phase: Phase = Phase.STARTING) -> None:
        self._clock = clock
        self.phase = phase
        self.num_restarts = 0
        self.num_barren_deaths = 0
        self._num_deaths_in_a_row = 0
        self._ready_at: float | None = None
        self._restart_at = 0.0

    def ready(self) -> None:
        """Record that the engine serves."""
        self._enter(Phase.SERVING)
        self._ready_at = self._clock()

    def died(self, death: Death) -> None:
        """Record a death: DOWN until the next start is due, or GIVEN_UP."""
        now = self._clock()
        if self._ready_at is not None and now - self._ready_at >= STABLE_AFTER_S:
            self._num_deaths_in_a_row = 0
        was_healthy = (death.is_external or death.was_asleep) and self._ready_at is not None
        if not was_healthy:
            self._num_deaths_in_a_row += 1
        if death.num_tokens:
            self.num_barren_deaths = 0
        elif not (death.is_external or was_healthy):
            self.num_barren_deaths += 1
        self._ready_at = None
        self._restart_at = now if was_healthy else now + restart_delay_s(self._num_deaths_in_a_row)
        self._enter(Phase.GIVEN_UP if self.num_barren_deaths >= CRASH_LOOP_LIMIT else Phase.DOWN)

    def park(self) -> None:
        """Record that its process ended in order, or failed to start, and that the next one starts when needed."""
        self._ready_at = None
        self._enter(Phase.PARKED)

    def starting(self) -> None:
        """Record that a process is started because the model is needed."""
        if self.phase is Phase.PARKED:
            self._enter(Phase.STARTING)
        else:
            self.restarting()

    def restarting(self) -> None:
        """Record that the next process is started."""
        self._enter(Phase.RESTARTING)
        self.num_restarts += 1

    def leave(self) -> None:
        """Record that the engine is stopped for good. ``GIVEN_UP`` stays as it is."""
        if self.phase is not Phase.GIVEN_UP:
            self._enter(Phase.LEFT)

    @property
    def restart_in_s(self) -> float:
        """Time until the next start is due; 0 if it is overdue."""
        return max(0.0, self._restart_at - self._clock())

    def _enter(self, phase: Phase) -> None:
        if phase not in NEXT_PHASES[self.phase]:
            raise ValueError(f"an engine that is {self.phase} cannot become {phase}")
        self.phase = phase
