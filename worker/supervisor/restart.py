"""When a dead engine is started again, and when it is given up. Pure: decides by a clock, starts nothing.

    STARTING ──ready──▶ SERVING ──death──▶ DOWN ──delay over──▶ RESTARTING ──ready──▶ SERVING
                                            ▲ └───────◀──────death──┘ │
                                            └── crash loop: GIVEN_UP ◀┘        LEFT: told to leave, from anywhere

Two rows of deaths are counted apart. *Deaths in a row* set the delay: the first restart comes at once, since most
deaths are single; a life that stayed up for a while ends the row, and a serving engine that was killed from outside
does not lengthen it: it would have gone on. *Barren deaths*, in which the engine generated no
token and nothing outside was to blame, set the limit: more starts would not help, and each may cost a delivery.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

import msgspec

from ...shared.restart_delay import STABLE_AFTER_S, restart_delay_s

# Poison requests are parked after a few deaths, so a healthy engine gets past two of them before this.
CRASH_LOOP_LIMIT = 8


class Phase(enum.StrEnum):
    """Where an engine is in its lives."""

    STARTING = "starting"
    SERVING = "serving"
    DOWN = "down"
    RESTARTING = "restarting"
    GIVEN_UP = "given_up"
    LEFT = "left"


NEXT_PHASES: dict[Phase, frozenset[Phase]] = {
    # Down before it has served: one that joins others, which serve on.
    Phase.STARTING: frozenset({Phase.SERVING, Phase.DOWN, Phase.GIVEN_UP, Phase.LEFT}),
    Phase.SERVING: frozenset({Phase.DOWN, Phase.GIVEN_UP, Phase.LEFT}),
    Phase.DOWN: frozenset({Phase.RESTARTING, Phase.LEFT}),
    Phase.RESTARTING: frozenset({Phase.SERVING, Phase.DOWN, Phase.GIVEN_UP, Phase.LEFT}),
    Phase.GIVEN_UP: frozenset(),
    Phase.LEFT: frozenset(),
}


class Death(msgspec.Struct, frozen=True):
    """How one life of an engine ended.

    Args:
        reason: a phrase for people.
        is_external: it was ended from outside, so neither the engine nor its requests are to blame.
        num_tokens: how many tokens it had generated in this life.
        trace: its traceback, if it left one.
    """

    reason: str
    is_external: bool = False
    num_tokens: int = 0
    trace: str = ""


class RestartPolicy:
    """One engine's phase and its rows of deaths.

    Attributes:
        phase: changed by the methods alone, along ``NEXT_PHASES``.
        num_restarts: how often it was started again.
        num_barren_deaths: length of the row that ends in ``GIVEN_UP``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.phase = Phase.STARTING
        self.num_restarts = 0
        self.num_barren_deaths = 0
        self._num_deaths_in_a_row = 0
        self._ready_at: float | None = None
        self._restart_at = 0.0

    def ready(self) -> None:
        """It serves."""
        self._enter(Phase.SERVING)
        self._ready_at = self._clock()

    def died(self, death: Death) -> None:
        """It is dead: DOWN until its next start is due, or GIVEN_UP."""
        now = self._clock()
        if self._ready_at is not None and now - self._ready_at >= STABLE_AFTER_S:
            self._num_deaths_in_a_row = 0
        was_healthy = death.is_external and self._ready_at is not None
        if not was_healthy:
            self._num_deaths_in_a_row += 1
        if death.num_tokens:
            self.num_barren_deaths = 0
        elif not death.is_external:
            self.num_barren_deaths += 1
        self._ready_at = None
        self._restart_at = now if was_healthy else now + restart_delay_s(self._num_deaths_in_a_row)
        self._enter(Phase.GIVEN_UP if self.num_barren_deaths >= CRASH_LOOP_LIMIT else Phase.DOWN)

    def restarting(self) -> None:
        """Its next life begins."""
        self._enter(Phase.RESTARTING)
        self.num_restarts += 1

    def leave(self) -> None:
        """It is not to be started again; what was given up stays so."""
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
