"""How events are delivered."""

from __future__ import annotations

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.shown import shown
from .addresses import Networks


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of deliveries, checked when made. The defaults try eleven times, in 26 hours.

    Args:
        allowed_networks: networks (CIDR) that may be called though they are private, loopback or the like; "all" for
            every address.
        timeout_s: how long an attempt may take as a whole.
        max_response_bytes: how much of an answer is read; the rest is not waited for.
        first_delay_s: between the first attempt and the second; each delay is four times the one before, up to
            ``max_delay_s``, and up to a tenth longer or shorter by chance.
        max_attempts: after that many the event is in the dead letter.
        keep_delivered_s: how long a delivered event can be looked at and replayed.

    Raises:
        ConfigurationError: a value is out of range or no network; the message names it.
    """

    allowed_networks: tuple[str, ...] = ()
    timeout_s: float = 15.0
    max_response_bytes: int = 16384
    first_delay_s: float = 5.0
    max_delay_s: float = 21600.0
    max_attempts: int = 11
    keep_delivered_s: float = 3 * 86400.0

    def __post_init__(self) -> None:
        for name in (
            "timeout_s",
            "max_response_bytes",
            "first_delay_s",
            "max_delay_s",
            "max_attempts",
            "keep_delivered_s",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                raise ConfigurationError(f"{name} must be a positive number, got {shown(value)}")
        Networks(self.allowed_networks)

    @property
    def networks(self) -> Networks:
        return Networks(self.allowed_networks)

    def delay_s(self, num_attempts: int) -> float | None:
        """Seconds from the last of so many attempts to the next, before chance; None if there is no next."""
        if num_attempts >= self.max_attempts:
            return None
        return min(self.max_delay_s, self.first_delay_s * 4 ** min(num_attempts - 1, 20))
