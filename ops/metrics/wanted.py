"""The number of engines that a model's load needs: the signal for autoscalers.

    wanted = KV cache in use, in engines / target usage  +  tokens that wait / (tokens/s of an engine x wanted wait)

Both sides of the second quotient count prompts and ``max_tokens``, so requests that use less than ``max_tokens`` do not
bias it. It is known while no engine runs, since the queue is in Redis. Then the last known speed of an engine is used;
if none is known, waiting requests need one engine.
"""

from __future__ import annotations

import msgspec

from ...shared.deployment.records import EngineHeartbeat
from ...shared.metrics import SERVING
from ...shared.queue.stats import QueueStats


class WantedOptions(msgspec.Struct, frozen=True):
    """Targets of an operator.

    Args:
        wait_s: time in seconds within which waiting requests should be served.
        kv_cache_usage: target usage of the engines' KV caches.
    """

    wait_s: float = 10.0
    kv_cache_usage: float = 0.8


class ServiceRate:
    """Tokens per second that one engine of a model serves; the last value while none serves."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None

    def saw(self, queue: QueueStats) -> None:
        if queue.engine_tokens_per_s is not None:
            self.tokens_per_s = queue.engine_tokens_per_s


def wanted_for_waiting(num_tokens: float, tokens_per_s: float | None, wait_s: float) -> float:
    """Return the number of engines that serve ``num_tokens`` in ``wait_s``; 1 if ``tokens_per_s`` is unknown."""
    if not num_tokens:
        return 0.0
    return num_tokens / (tokens_per_s * wait_s) if tokens_per_s else 1.0


def wanted_engines(
    queue: QueueStats, engines: list[EngineHeartbeat], rate: ServiceRate, options: WantedOptions
) -> float:
    """Return the number of engines that the load of a model needs, to be rounded up; 0 if it needs none."""
    serving = [engine for engine in engines if engine.state in SERVING]
    rate.saw(queue)
    busy = sum(engine.kv_cache_usage for engine in serving) / options.kv_cache_usage
    # Returned requests have no count of tokens, but need an engine.
    num_waiting = 0 if queue.is_paused else queue.num_tokens + queue.num_returned
    return busy + wanted_for_waiting(num_waiting, rate.tokens_per_s, options.wait_s)
