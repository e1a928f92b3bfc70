"""Rate limits of the caller's tenant in the headers of OpenAI, by which SDKs pace themselves.

Redis is asked once per response of a tenant with quotas per minute. That a tenant has none is remembered for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from ...shared.connection import CommandConnection
from ...shared.errors import PenstockError
from ...shared.keys import Keys
from ...shared.partitions import read_rate_limits
from ...shared.process.log import get_logger
from .. import Client

PREFIX = "x-ratelimit"
# For how long a new quota may lack its headers.
UNLIMITED_TTL_S = 5.0
MAX_UNLIMITED = 10_000
TIMEOUT_S = 1.0
log = get_logger(__name__)


class RateLimits:
    """Reads the rate limits of tenants."""

    def __init__(self, client: Client, connection: CommandConnection, keys: Keys) -> None:
        self._client = client
        self._connection = connection
        self._keys = keys
        # Model and tenant -> monotonic time until which it is taken to have no limits.
        self._unlimited: OrderedDict[tuple[str | None, str], float] = OrderedDict()

    async def headers_for(self, model: str | None, tenant: str) -> dict[str, str]:
        """Return the headers; none without limits, or if Redis does not answer in time."""
        now = time.monotonic()
        if self._unlimited.get((model, tenant), 0.0) > now:
            return {}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                name, _ = await self._client.find_model(model, tenant=tenant)
                limits = await read_rate_limits(self._connection, self._keys, name, tenant)
        except (PenstockError, TimeoutError) as error:
            log.debug("rate_limits_unknown", error=str(error))
            return {}
        if limits is None:
            self._unlimited[model, tenant] = now + UNLIMITED_TTL_S
            self._unlimited.move_to_end((model, tenant))
            if len(self._unlimited) > MAX_UNLIMITED:
                self._unlimited.popitem(last=False)
            return {}
        headers: dict[str, str] = {}
        for unit, limit in (("requests", limits.requests), ("tokens", limits.tokens)):
            if limit is not None:
                headers[f"{PREFIX}-limit-{unit}"] = str(limit.most)
                headers[f"{PREFIX}-remaining-{unit}"] = str(limit.remaining)
                headers[f"{PREFIX}-reset-{unit}"] = f"{limits.reset_ms}ms"
        return headers
