"""Settings of webhook deliveries."""

from __future__ import annotations

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.values.shown import shown
from .addresses import Networks


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of deliveries, validated on creation. The defaults make eleven attempts in 26 hours.

    Args:
        allowed_networks: private, loopback or other special networks (CIDR) that may be called; "all" for every
            address.
        timeout_s: time limit of a whole attempt.
        max_response_bytes: how much of a response is read; the rest is ignored.
        first_delay_s: between the first and second attempt. Each delay is four times the previous one, up to
            ``max_delay_s``, and randomly up to a tenth longer or shorter.
        max_attempts: after this many the event becomes a dead letter.
        keep_delivered_s: how long a delivered event can be inspected and replayed.

    Raises:
        ConfigurationError: a value is out of range, or not a network; the message names it.
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
        """Return the seconds from attempt ``num_attempts`` to the next, without jitter; None if there is no next."""
        if num_attempts >= self.max_attempts:
            return None
        return min(self.max_delay_s, self.first_delay_s * 4 ** min(num_attempts - 1, 20))
