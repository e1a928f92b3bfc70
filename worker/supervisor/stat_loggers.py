"""Stat loggers: the built-in log line about what engines do, and loggers that an operator names.

A factory creates a logger for each engine from its configuration, or, if the factory has ``is_aggregate``, one logger
for all engines of the worker. A logger records statistics every second, and logs at each interval.

Source: vLLM 0.33, ``vllm/v1/metrics/loggers.py``, for the roles and their names.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import structlog

from ...shared.deployment.records import EngineHeartbeat
from ...shared.errors import ConfigurationError
from ...shared.process.plugins import STAT_LOGGERS, load_object
from ..config.worker_config import STATUS_INTERVAL_S, WorkerConfig

_COUNTED = ("num_prompt_tokens", "num_output_tokens", "num_prefill_tokens", "prefix_cache_queries", "prefix_cache_hits")

log = structlog.get_logger()


class StatLogger(Protocol):
    """Receiver of the statistics of engines."""

    def record(self, beat: EngineHeartbeat, engine_index: int) -> None:
        """Record the state and counters of an engine; called about once a second for each engine."""

    def log(self) -> None:
        """Log the recorded statistics; called at each interval, never if that is 0."""


# A factory makes the logger of one engine, or with ``is_aggregate = True`` of all engines.
StatLoggerFactory = Callable[[WorkerConfig], StatLogger]
AggregateStatLoggerFactory = Callable[[Sequence[WorkerConfig]], StatLogger]


class LoggingStatLogger:
    """Logs a line for each interval in which the engine did work."""

    def __init__(self, config: WorkerConfig) -> None:
        self._labels = {"model": config.engine.model_name, "engine": config.engine_name, "engine_id": config.engine_id}
        self._sum = _Sum()

    def record(self, beat: EngineHeartbeat, engine_index: int) -> None:
        self._sum.record(beat, engine_index)

    def log(self) -> None:
        stats = self._sum.stats_since_last_call()
        if stats is not None:
            log.info("engine_stats", **self._labels, **stats)


class AggregatedLoggingStatLogger:
    """Logs a line about all engines of the worker together."""

    is_aggregate = True

    def __init__(self, configs: Sequence[WorkerConfig]) -> None:
        self._model = configs[0].engine.model_name
        self._sum = _Sum()

    def record(self, beat: EngineHeartbeat, engine_index: int) -> None:
        self._sum.record(beat, engine_index)

    def log(self) -> None:
        stats = self._sum.stats_since_last_call()
        if stats is not None:
            log.info("worker_stats", model=self._model, num_engines=self._sum.num_engines, **stats)


class StatLoggerManager:
    """All stat loggers of a worker. An error of a logger is logged, and the logger is called again next time.

    Args:
        factories: factories of loggers in addition to the built-in one.
        interval_s: interval of the calls of ``log``; 0 for none.
        is_aggregated: whether the built-in logger writes one line for all engines.
        make_config: returns the configuration of an engine that is started later, by index.
    """

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        factories: Iterable[StatLoggerFactory | AggregateStatLoggerFactory],
        *,
        interval_s: float,
        is_aggregated: bool,
        make_config: Callable[[int], WorkerConfig] | None = None,
    ) -> None:
        built_in = AggregatedLoggingStatLogger if is_aggregated else LoggingStatLogger
        self._interval_s = interval_s
        self._of_engine: list[list[StatLogger]] = [[] for _ in configs]
        self._all: list[StatLogger] = []
        self._aggregates: list[StatLogger] = []
        self._make_config = make_config or configs.__getitem__
        self._factories = ([built_in] if interval_s else []) + [*factories]
        for factory in self._factories:
            if getattr(factory, "is_aggregate", False):
                self._aggregates.append(cast(AggregateStatLoggerFactory, factory)(configs))
                self._add(self._aggregates[-1], range(len(configs)))
            else:
                for index, config in enumerate(configs):
                    self._add(cast(StatLoggerFactory, factory)(config), [index])

    def _add(self, logger: StatLogger, indexes: Iterable[int]) -> None:
        self._all.append(logger)
        for index in indexes:
            self._of_engine[index].append(logger)

    async def run(self, read_heartbeats: Callable[[], Sequence[EngineHeartbeat | None]]) -> None:
        """Call the loggers until cancelled.

        Args:
            read_heartbeats: returns the heartbeat of each engine, by index; None for one that has left.
        """
        clock = asyncio.get_running_loop().time
        due = clock() + self._interval_s
        while self._all:
            await asyncio.sleep(STATUS_INTERVAL_S)
            self.record(read_heartbeats())
            if self._interval_s and clock() >= due:
                due = clock() + self._interval_s
                self.log()

    def record(self, beats: Sequence[EngineHeartbeat | None]) -> None:
        """Pass the heartbeat of each engine to its loggers."""
        for index, beat in enumerate(beats):
            if beat is None:
                continue
            if index == len(self._of_engine):
                self._grow(index)
            for logger in self._of_engine[index]:
                _guarded(logger, lambda logger=logger, beat=beat, index=index: logger.record(beat, index))

    def _grow(self, index: int) -> None:
        """Create the loggers of an engine that was started later."""
        self._of_engine.append([])
        config = self._make_config(index)
        for factory in self._factories:
            if not getattr(factory, "is_aggregate", False):
                self._add(cast(StatLoggerFactory, factory)(config), [index])
        self._of_engine[index] += self._aggregates

    def log(self) -> None:
        """Let all loggers log once."""
        for logger in self._all:
            _guarded(logger, logger.log)


def load_factories(names: Iterable[str]) -> list[StatLoggerFactory | AggregateStatLoggerFactory]:
    """Return the factories that an operator named, as "module:name" or as plug-ins.

    Raises:
        ConfigurationError: a name cannot be imported, or is not a factory.
    """
    return [_load(name) for name in names]


def _load(name: str) -> Any:
    factory = load_object(STAT_LOGGERS, name)
    if not callable(factory):
        raise ConfigurationError(f"--stat-logger must be MODULE:FACTORY, got {name}; the factory makes a StatLogger")
    return factory


def _guarded(logger: StatLogger, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # code of the operator may raise anything
        log.warning("stat_logger_failed", logger_name=type(logger).__name__, error=f"{type(error).__name__}: {error}")


class _Sum:
    """Sum of the work of some engines since the last log line."""

    def __init__(self) -> None:
        self._beats: dict[int, EngineHeartbeat] = {}
        self._before: dict[int, EngineHeartbeat] = {}
        self._spoken_at_s = time.monotonic()

    @property
    def num_engines(self) -> int:
        return len(self._beats)

    def record(self, beat: EngineHeartbeat, engine_index: int) -> None:
        self._beats[engine_index] = beat

    def stats_since_last_call(self) -> dict[str, Any] | None:
        """Return the statistics since the last call; None if no work was done and none is queued."""
        now_s = time.monotonic()
        seconds, self._spoken_at_s = max(1e-3, now_s - self._spoken_at_s), now_s
        grown: Counter[str] = Counter()
        for index, beat in self._beats.items():
            grown.update(_growth(beat, self._before.get(index)))
        self._before = dict(self._beats)
        beats = self._beats.values()
        num_running = sum(beat.num_running_reqs for beat in beats)
        num_waiting = sum(beat.num_waiting_reqs for beat in beats)
        if not (grown["num_output_tokens"] or grown["num_prefill_tokens"] or num_running or num_waiting):
            return None
        queries = grown["prefix_cache_queries"]
        return {
            "prompt_tokens_per_s": round(grown["num_prompt_tokens"] / seconds, 1),
            "generation_tokens_per_s": round(grown["num_output_tokens"] / seconds, 1),
            "num_running": num_running,
            "num_waiting": num_waiting,
            "kv_cache_usage": round(max((beat.kv_cache_usage for beat in beats), default=0.0), 3),
            "prefix_cache_hit_share": round(grown["prefix_cache_hits"] / queries, 3) if queries else 0.0,
        }


def _growth(now: EngineHeartbeat, before: EngineHeartbeat | None) -> dict[str, int]:
    """Return the growth of the counters of an engine; all of them if ``before`` is from another process of it."""
    if now.stats is None:
        return {}
    old = None if before is None or before.started_at != now.started_at else before.stats
    return {name: getattr(now.stats, name) - (getattr(old, name) if old is not None else 0) for name in _COUNTED}
