"""Figures of engines at intervals, in the log and in loggers of an operator's own."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import ClassVar

import pytest
from structlog.testing import capture_logs

from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.supervision import EngineState
from penstock.shared.stats import EngineStats
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.supervisor.stat_loggers import StatLogger, StatLoggerManager, load_factories

CONFIGS = [
    WorkerConfig(worker_id="w", engine_id=f"w-{i}", engine_name=f"h-{i}", redis_url="", engine=EngineConfig(model="m"))
    for i in range(2)
]


def beat(index: int, num_output_tokens: int = 0, *, started_at: float = 1.0, num_running: int = 0) -> EngineHeartbeat:
    return EngineHeartbeat(
        worker_id="w",
        engine_id=f"w-{index}",
        model="m",
        state=EngineState.BUSY,
        host="h",
        worker_pid=1,
        core_pid=2,
        started_at=started_at,
        num_running_reqs=num_running,
        stats=EngineStats(num_output_tokens=num_output_tokens, num_prompt_tokens=num_output_tokens // 2),
    )


def manager(*factories: type[StatLogger], interval_s: float = 10.0, is_aggregated: bool = False) -> StatLoggerManager:
    return StatLoggerManager(CONFIGS, factories, interval_s=interval_s, is_aggregated=is_aggregated)


def test_each_engine_that_did_something_has_a_line() -> None:
    loggers = manager()
    with capture_logs() as logs:
        loggers.record([beat(0, 100), beat(1)])
        loggers.log()
        assert [(line["event"], line["engine"]) for line in logs] == [("engine_stats", "h-0")]
        assert logs[0]["generation_tokens_per_s"] > logs[0]["prompt_tokens_per_s"] > 0
        logs.clear()
        loggers.record([beat(0, 100), beat(1, num_running=2)])
        loggers.log()
        assert [(line["engine"], line["num_running"]) for line in logs] == [("h-1", 2)], "what was told is not new"
        logs.clear()
        loggers.record([beat(0, 7, started_at=2.0), beat(1)])
        loggers.log()
        assert [line["engine"] for line in logs] == ["h-0"], "another life of it counts from 0"
        assert logs[0]["generation_tokens_per_s"] > 0


def test_one_line_for_all() -> None:
    loggers = manager(is_aggregated=True)
    with capture_logs() as logs:
        loggers.record([beat(0, 100, num_running=1), beat(1, 50, num_running=3)])
        loggers.log()
    (line,) = logs
    assert (line["event"], line["num_engines"], line["num_running"]) == ("worker_stats", 2, 4)


class OperatorLogger:
    """A logger of an operator's."""

    instances: ClassVar[list[object]] = []
    beats: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, configs: WorkerConfig | Sequence[WorkerConfig]) -> None:
        self.instances.append(configs)

    def record(self, beat: EngineHeartbeat, engine_index: int) -> None:
        self.beats.append((beat.engine_id, engine_index))

    def log(self) -> None:
        raise ValueError("its disk is full")


class AggregateLogger(OperatorLogger):
    is_aggregate = True


@pytest.mark.parametrize(("kind", "instances"), [(OperatorLogger, CONFIGS), (AggregateLogger, [CONFIGS])])
def test_a_custom_stat_logger_gets_every_engine_and_may_fail(
    kind: type[OperatorLogger], instances: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OperatorLogger, "instances", [])
    monkeypatch.setattr(OperatorLogger, "beats", [])
    loggers = manager(kind, interval_s=0)
    assert OperatorLogger.instances == instances
    with capture_logs() as logs:
        loggers.record([beat(0, 5), beat(1, 5)])
        loggers.log()
    assert OperatorLogger.beats == [("w-0", 0), ("w-1", 1)]
    assert {(line["event"], line["error"]) for line in logs} == {("stat_logger_failed", "ValueError: its disk is full")}


def test_factories_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("operators_loggers")
    module.__dict__.update(OperatorLogger=OperatorLogger, number=3)
    monkeypatch.setitem(sys.modules, "operators_loggers", module)
    assert load_factories(["operators_loggers:OperatorLogger"]) == [OperatorLogger]
    for name, part in (
        ("nowhere:OperatorLogger", "--stat-logger nowhere:OperatorLogger cannot be imported: ModuleNotFoundError"),
        ("operators_loggers:Gone", "--stat-logger operators_loggers:Gone cannot be imported: AttributeError"),
        ("operators_loggers", "--stat-logger 'operators_loggers' is no entry point of the group penstock.stat_loggers"),
        ("operators_loggers:number", "must be MODULE:FACTORY"),
    ):
        with pytest.raises(ConfigurationError, match=part):
            load_factories([name])
