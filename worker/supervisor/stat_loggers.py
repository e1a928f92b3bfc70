"""Who is told what engines do, while they do it: our line in the log, and loggers of an operator's own.

A logger is made by a factory: one for each engine from its configuration, or one for all engines of the worker from
theirs, where the factory says ``is_aggregate``. It is told every second, and asked to speak at each interval.

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
from ...shared.plugins import STAT_LOGGERS, load_object
from ..config.worker_config import STATUS_INTERVAL_S, WorkerConfig

_COUNTED = ("num_prompt_tokens", "num_output_tokens", "num_prefill_tokens", "prefix_cache_queries", "prefix_cache_hits")

log = structlog.get_logger()


class StatLogger(Protocol):
    """Whatever is told of engines."""

    def record(self, beat: EngineHeartbeat, engine_index: int) -> None:
        """Take what an engine is and has counted by now; about once a second for each engine."""

    def log(self) -> None:
        """Speak of it, at each interval; never if that is 0."""


# Of one engine, or with ``is_aggregate = True`` of all.
StatLoggerFactory = Callable[[WorkerConfig], StatLogger]
AggregateStatLoggerFactory = Callable[[Sequence[WorkerConfig]], StatLogger]


class LoggingStatLogger:
    """A line in the log for each interval in which the engine did something."""

    def __init__(self, config: WorkerConfig) -> None:
        self._labels = {"model": config.engine.model_name, "engine": config.engine_name, "engine_id": config.engine_id}
        self._sum = _Sum()

    def record(self, beat: EngineHeartbeat, engine_index: int) -> None:
        self._sum.record(beat, engine_index)

    def log(self) -> None:
        told = self._sum.take()
        if told is not None:
            log.info("engine_stats", **self._labels, **told)


class AggregatedLoggingStatLogger:
    """The same for all engines of the worker together."""

    is_aggregate = True

    def __init__(self, configs: Sequence[WorkerConfig]) -> None:
        self._model = configs[0].engine.model_name
        self._sum = _Sum()

    def record(self, beat: EngineHeartbeat, engine_index: int) -> None:
        self._sum.record(beat, engine_index)

    def log(self) -> None:
        told = self._sum.take()
        if told is not None:
            log.info("worker_stats", model=self._model, num_engines=self._sum.num_engines, **told)


class StatLoggerManager:
    """All loggers of a worker. One that raises is told of and goes on being called: it may be better by then.

    Args:
        factories: of loggers beside ours.
        interval_s: at which loggers speak; 0 never.
        is_aggregated: whether our line is one for all engines.
        make_config: of an engine that is started later, by index.
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
        own = AggregatedLoggingStatLogger if is_aggregated else LoggingStatLogger
        self._interval_s = interval_s
        self._of_engine: list[list[StatLogger]] = [[] for _ in configs]
        self._all: list[StatLogger] = []
        self._aggregates: list[StatLogger] = []
        self._make_config = make_config or configs.__getitem__
        self._factories = ([own] if interval_s else []) + [*factories]
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

    async def run(self, look: Callable[[], Sequence[EngineHeartbeat | None]]) -> None:
        """Tell and ask until cancelled.

        Args:
            look: returns what is known of each engine, by index; None of one that has left.
        """
        clock = asyncio.get_running_loop().time
        due = clock() + self._interval_s
        while self._all:
            await asyncio.sleep(STATUS_INTERVAL_S)
            self.record(look())
            if self._interval_s and clock() >= due:
                due = clock() + self._interval_s
                self.log()

    def record(self, beats: Sequence[EngineHeartbeat | None]) -> None:
        """Tell all loggers once."""
        for index, beat in enumerate(beats):
            if beat is None:
                continue
            if index == len(self._of_engine):
                self._grow(index)
            for logger in self._of_engine[index]:
                _guarded(logger, lambda logger=logger, beat=beat, index=index: logger.record(beat, index))

    def _grow(self, index: int) -> None:
        """Make loggers for an engine that was started beside the others."""
        self._of_engine.append([])
        config = self._make_config(index)
        for factory in self._factories:
            if not getattr(factory, "is_aggregate", False):
                self._add(cast(StatLoggerFactory, factory)(config), [index])
        self._of_engine[index] += self._aggregates

    def log(self) -> None:
        """Ask all loggers once."""
        for logger in self._all:
            _guarded(logger, logger.log)


def load_factories(names: Iterable[str]) -> list[StatLoggerFactory | AggregateStatLoggerFactory]:
    """Return the factories that an operator has named, as "module:name" or as plug-ins.

    Raises:
        ConfigurationError: one cannot be imported, or is none.
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
    except Exception as error:  # of whatever an operator has named
        log.warning("stat_logger_failed", logger_name=type(logger).__name__, error=f"{type(error).__name__}: {error}")


class _Sum:
    """What some engines have done since they were spoken of last."""

    def __init__(self) -> None:
        self._beats: dict[int, EngineHeartbeat] = {}
        self._before: dict[int, EngineHeartbeat] = {}
        self._spoken_at_s = time.monotonic()

    @property
    def num_engines(self) -> int:
        return len(self._beats)

    def record(self, beat: EngineHeartbeat, engine_index: int) -> None:
        self._beats[engine_index] = beat

    def take(self) -> dict[str, Any] | None:
        """Return the figures of the interval; None if nothing was done and nothing is there to do."""
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
    """What an engine has counted since; all of it where another life of it had counted before."""
    if now.stats is None:
        return {}
    old = None if before is None or before.started_at != now.started_at else before.stats
    return {name: getattr(now.stats, name) - (getattr(old, name) if old is not None else 0) for name in _COUNTED}
