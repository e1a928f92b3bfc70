"""Measured times of a model on a device: to wake, to sleep, and to compute prompts."""

from __future__ import annotations

from ...shared.deployment.records import EngineHeartbeat
from ...shared.messages.devices import SWAP_TIME_S
from ...shared.stats import EngineStats, Histogram
from ...shared.swap.views import SleepLevel

# Weight of the newest measurement.
_NEWEST = 0.3
# Estimates until something was measured: bytes per second from disk and within memory, and time of a process to start.
_DISK_BYTES_PER_S, _MEMORY_BYTES_PER_S, _START_S = 1e9, 1e10, 1.0
# Fewer prompt tokens give no meaningful time.
_MIN_TOKENS = 64


class Costs:
    """Averages of the times of one model, and all of them by level, for its record.

    Attributes:
        wakes, sleeps: seconds by level as text.
        slowness: by how much loads on this device take longer than estimated.
    """

    def __init__(self) -> None:
        self.wakes: dict[str, Histogram] = {}
        self.sleeps: dict[str, Histogram] = {}
        self.slowness = 1.0
        self._wake_s: dict[SleepLevel, float] = {}
        self._sleep_s: dict[SleepLevel, float] = {}
        self._token_s = 0.0

    @property
    def wakes_s(self) -> dict[SleepLevel, float]:
        """Measured times to wake, by level."""
        return self._wake_s

    def record_wake(self, level: SleepLevel, time_s: float) -> None:
        _record(self._wake_s, self.wakes, level, time_s)

    def record_sleep(self, level: SleepLevel, time_s: float) -> None:
        _record(self._sleep_s, self.sleeps, level, time_s)

    def wake_s(self, level: SleepLevel, weight_bytes: int) -> float:
        """Return the time to wake from a level; an estimate until it was measured."""
        if level is SleepLevel.AWAKE:
            return 0.0
        if level in self._wake_s:
            return self._wake_s[level]
        if level is SleepLevel.HOST_MEMORY:
            return weight_bytes / _MEMORY_BYTES_PER_S
        return self._wake_s.get(SleepLevel.DISK, self.slowness * _load_s(weight_bytes))

    def load_slowness(self, weight_bytes: int) -> float:
        """Return the factor by which loads take longer than estimated; 0 before the first."""
        return self._wake_s.get(SleepLevel.DISK, 0.0) / _load_s(weight_bytes)

    @property
    def sleep_s(self) -> float:
        """Time to put it to sleep, at the level that took longest."""
        return max(self._sleep_s.values(), default=0.0)

    def record_stats(self, stats: EngineStats) -> None:
        """Measure the time that a token adds to a step: the slope of the line through the times of all steps.

        Time that a step takes anyway is not the prompt's, and short prompts are computed beside decoding requests.
        """
        num_tokens = stats.num_prefill_tokens + stats.num_decode_tokens
        variance = stats.num_steps * stats.step_tokens_squared - num_tokens**2
        if stats.num_prefill_tokens < _MIN_TOKENS or variance <= 0:
            return
        slope_s = (stats.num_steps * stats.step_token_seconds - num_tokens * stats.execute_time_s) / variance
        # Noise of a busy machine may hide it.
        if slope_s > 0:
            self._token_s = slope_s

    def relost_s(self, num_tokens: int) -> float:
        """Return the time to compute the cache of running requests again; 0 until the speed was measured."""
        return num_tokens * self._token_s


def running_tokens(beat: EngineHeartbeat) -> int:
    """Return the tokens in the KV cache of running requests."""
    if beat.setup is None or not beat.num_running_reqs:
        return 0
    return int(beat.kv_cache_usage * beat.setup.kv_cache_size_tokens)


def _load_s(weight_bytes: int) -> float:
    return _START_S + weight_bytes / _DISK_BYTES_PER_S


def _record(means: dict[SleepLevel, float], histograms: dict[str, Histogram], level: SleepLevel, time_s: float) -> None:
    means[level] = (1 - _NEWEST) * means[level] + _NEWEST * time_s if level in means else time_s
    histograms.setdefault(str(int(level)), Histogram.empty(SWAP_TIME_S)).observe(time_s)
