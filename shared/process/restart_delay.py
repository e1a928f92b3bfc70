"""The delay before a dead process is restarted: none at first, then ever longer ones. Pure."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# A process that ran for this long after it was ready resets the delay.
STABLE_AFTER_S = 60.0


def restart_delay_s(num_deaths_in_a_row: int) -> float:
    """Return 0, 0.5, 1, 2, 4, ... s, capped. Most deaths are single, so the first restart is immediate."""
    if num_deaths_in_a_row == 1:
        return 0.0
    # The exponent is limited as well, since a row of deaths may last for days.
    return min(FIRST_DELAY_S * 2 ** min(num_deaths_in_a_row - 2, 16), MAX_DELAY_S)
