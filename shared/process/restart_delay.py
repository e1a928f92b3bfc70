"""When a process that died is started again: at once, then after ever longer pauses. Pure."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# A life that went on for this long after it was ready ends the row that the delay grows with.
STABLE_AFTER_S = 60.0


def restart_delay_s(num_deaths_in_a_row: int) -> float:
    """0, 0.5, 1, 2, 4, ... s, capped. Most deaths are single, so the first restart comes at once."""
    if num_deaths_in_a_row == 1:
        return 0.0
    # The exponent is bounded as well: a row may grow for days.
    return min(FIRST_DELAY_S * 2 ** min(num_deaths_in_a_row - 2, 16), MAX_DELAY_S)
