"""How many engines a model's load asks for: the signal of an autoscaler.

    wanted = KV cache in use, in engines / target usage  +  tokens that wait / (tokens/s of an engine x wanted wait)

Both sides of the second quotient count prompts and ``max_tokens``, so requests that ask for more than they use do not
bias it. It is known while no engine runs, since the queue is in Redis: then an engine serves as fast as one did last,
and if none was ever seen, whatever waits asks for one.
"""

from __future__ import annotations

import msgspec

from ...shared.deployment.records import EngineHeartbeat
from ...shared.metrics import SERVING
from ...shared.queue.stats import QueueStats


class WantedOptions(msgspec.Struct, frozen=True):
    """What an operator wants.

    Args:
        wait_s: how long what waits may take to be served, in seconds.
        kv_cache_usage: share of their KV caches that engines are meant to use.
    """

    wait_s: float = 10.0
    kv_cache_usage: float = 0.8


class ServiceRate:
    """Tokens that one engine of a model serves in a second, remembered while none does."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None

    def saw(self, queue: QueueStats) -> None:
        if queue.engine_tokens_per_s is not None:
            self.tokens_per_s = queue.engine_tokens_per_s


def wanted_for_waiting(num_tokens: float, tokens_per_s: float | None, wait_s: float) -> float:
    """Return how many engines serve ``num_tokens`` in ``wait_s``, each ``tokens_per_s``; 1 where that is not known."""
    if not num_tokens:
        return 0.0
    return num_tokens / (tokens_per_s * wait_s) if tokens_per_s else 1.0


def wanted_engines(
    queue: QueueStats, engines: list[EngineHeartbeat], rate: ServiceRate, options: WantedOptions
) -> float:
    """Return how many engines the load of a model asks for, to be rounded up; 0 if it asks for none."""
    serving = [engine for engine in engines if engine.state in SERVING]
    rate.saw(queue)
    busy = sum(engine.kv_cache_usage for engine in serving) / options.kv_cache_usage
    # What was handed back has no count of tokens; it still wants somebody.
    num_waiting = 0 if queue.is_paused else queue.num_tokens + queue.num_returned
    return busy + wanted_for_waiting(num_waiting, rate.tokens_per_s, options.wait_s)
