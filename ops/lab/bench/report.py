"""The benchmark's tables and JSON, with machine, versions, seed and commit."""

from __future__ import annotations

import os
import platform
import subprocess
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ....shared.errors import PenstockError
from ....shared.process.processor import this_processor
from ...statistics import percentile
from .engines.gateway_row import GatewayRow
from .engines.growth import GrowthRow
from .engines.pooling import PoolingRow
from .engines.report import (
    engine_tables,
    follow_table,
    gateway_table,
    goals_table,
    growth_table,
    pooling_table,
    sessions_table,
)
from .engines.roofline import Bandwidth
from .engines.row import EngineRow
from .engines.sessions import SessionsRow
from .engines.sides import SERVED, VLLM_SERVED
from .goals import (
    Goal,
    adapter_goals,
    engine_goals,
    enqueue_goals,
    figures_goals,
    fleet_goals,
    follow_goals,
    gateway_goals,
    growth_goals,
    pooling_goals,
    sessions_goals,
)
from .lora.report import lora_goals, lora_table
from .lora.row import LoraRow
from .other_load import OtherLoad
from .queue.durability import DurabilityCost
from .queue.follow import FollowRow
from .queue.recovery import Recovery, StandbyMemory
from .queue.report import QueueRows, measured_rows, queue_table
from .result import add_caption
from .speculation.report import speculation_goals, speculation_table
from .speculation.row import SpeculationRow

T = TypeVar("T")
# CPU flags, as Linux names them, that determine the speed of matrix products.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
BANDWIDTH = "bandwidth of memory"
LIBRARIES = ("penstock", "torch", "transformers", "redis", "hiredis", "msgspec", "uvloop", "arq", "streaq")


class BenchReport(msgspec.Struct, kw_only=True):
    """Results of the chosen rows, and their origin. Versions of rivals are with their sides.

    ``failures`` has the error that ended a row, during or after its measurement; ``other_load`` the load of others
    meanwhile. Both are by label: the name of a row, or for the engines one label per model.
    """

    machine: dict[str, str]
    versions: dict[str, str]
    seed: int
    command: list[str]
    bandwidth: Bandwidth | None = None
    engines: list[EngineRow] = []
    failures: dict[str, str] = {}
    adapter: EngineRow | None = None
    gateway: GatewayRow | None = None
    growth: GrowthRow | None = None
    pooling: PoolingRow | None = None
    lora: LoraRow | None = None
    speculation: SpeculationRow | None = None
    sessions: SessionsRow | None = None
    follow: FollowRow | None = None
    durability: DurabilityCost | None = None
    recoveries: list[Recovery] = []
    standby_memory: StandbyMemory | None = None
    queue: QueueRows = msgspec.field(default_factory=QueueRows)
    goals: list[Goal] = []
    other_load: dict[str, OtherLoad] = {}

    @contextmanager
    def telling_failures(self, label: str) -> Iterator[None]:
        """Record an error in the block as a failure of a row, so that the results of other rows are not lost.

        An unexpected exception is recorded with the line that raised it.
        """
        try:
            yield
        except PenstockError as error:
            why = str(error)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno})"
        else:
            return
        self.failures[label] = "; ".join(filter(None, (self.failures.get(label), why)))


def engine_label(model: str) -> str:
    """Return the label of the engines' row for a model."""
    return f"engine, {model}"


def write_report(report: BenchReport, path: Path) -> None:
    """Write the JSON in place of the one that is there: a reader finds one or the other, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    unfinished.replace(path)


def machine() -> dict[str, str]:
    """Describe the machine: processor, cores, memory, system, and its load in the minute before."""
    processor, instructions = this_processor()
    return {
        "processor": processor or platform.processor(),
        "instructions": " ".join(name for name in _INSTRUCTIONS if name in instructions),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.0f}",
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_1min_before": f"{os.getloadavg()[0]:.2f}",
    }


def versions() -> dict[str, str]:
    """Library versions and the commit, where this is a checkout."""
    versions = {name: metadata.version(name) for name in LIBRARIES if _installed(name)}
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    completed = subprocess.run(git, capture_output=True, text=True, check=False)
    return versions | {"commit": completed.stdout.strip() or "unknown"}


def print_report(console: Console, report: BenchReport) -> None:
    """Print the tables of the measured rows, then the goals. A row that cannot be printed becomes a failure."""
    for label, tables in _sections(report):
        with report.telling_failures(label):
            # All of them first: half a row would pass for the whole.
            for table in list(tables()):
                if label in report.other_load:
                    add_caption(table, str(report.other_load[label]))
                console.print(table)
    if report.goals:
        console.print(goals_table(report.goals))
    for label, reason in report.failures.items():
        console.print(f"failed: {label}: {escape(reason)}", style="red")


def all_goals(report: BenchReport) -> list[Goal]:
    """Return the goals of the chosen rows; the queue's tables contain further ones.

    A row whose goals cannot be computed becomes a failure.
    """
    result: list[Goal] = []
    for label, goals in _goals_by_row(report):
        with report.telling_failures(label):
            result += list(goals())
    return result


def _sections(report: BenchReport) -> Iterator[tuple[str, Callable[[], Iterable[Table]]]]:
    """Yield the label and the tables of each measured row."""
    for row in report.engines:
        yield engine_label(row.model), partial(engine_tables, row, report.bandwidth)
    if report.adapter is not None:
        yield "adapter", partial(engine_tables, report.adapter, report.bandwidth, VLLM_SERVED)
    if report.gateway is not None:
        yield "gateway", partial(_one, gateway_table, report.gateway)
    if report.growth is not None:
        yield "growth", partial(_one, growth_table, report.growth)
    if report.pooling is not None:
        yield "pooling", partial(_one, pooling_table, report.pooling)
    if report.lora is not None:
        yield "lora", partial(_one, lora_table, report.lora)
    if report.speculation is not None:
        yield "speculation", partial(_one, speculation_table, report.speculation)
    if report.sessions is not None:
        yield "sessions", partial(_one, sessions_table, report.sessions)
    if report.follow is not None:
        yield "follow", partial(_one, follow_table, report.follow)
    if report.durability is not None:
        yield "durability", partial(_one, partial(_durability, report), report.durability)
    if report.recoveries:
        yield "recovery", partial(_one, _recovery, report)
    for name in measured_rows(report.queue):
        yield name, partial(_one, partial(queue_table, name), report.queue)


def _goals_by_row(report: BenchReport) -> Iterator[tuple[str, Callable[[], Iterable[Goal]]]]:
    for row in report.engines:
        yield engine_label(row.model), partial(engine_goals, row)
    if report.adapter is not None:
        yield "adapter", partial(adapter_goals, report.adapter)
    if report.gateway is not None:
        yield "gateway", partial(gateway_goals, report.gateway)
    if report.growth is not None:
        yield "growth", partial(growth_goals, report.growth)
    if report.pooling is not None:
        yield "pooling", partial(pooling_goals, report.pooling)
    if report.lora is not None:
        yield "lora", partial(lora_goals, report.lora)
    if report.speculation is not None:
        yield "speculation", partial(speculation_goals, report.speculation)
    if report.sessions is not None:
        yield "sessions", partial(sessions_goals, report.sessions)
    if report.follow is not None:
        yield "follow", partial(follow_goals, report.follow)
    if report.queue.enqueue is not None:
        yield "enqueue", partial(enqueue_goals, report.queue.enqueue)
    if report.queue.figures is not None:
        yield "figures", partial(figures_goals, report.queue.figures)
    if report.queue.fleet is not None:
        yield "fleet", partial(fleet_goals, report.queue.fleet)


def _one(draw: Callable[[T], Table], row: T) -> Iterator[Table]:
    yield draw(row)


def _durability(report: BenchReport, cost: DurabilityCost) -> Table:
    table = Table(title=f"durability, ms per step of {cost.batch_size} requests")
    figures = {"append: log, fence, publish": f"{cost.append_ms:.2f}", "publish only": f"{cost.publish_ms:.2f}"}
    for row in report.engines:
        served = row.side(SERVED)
        share = None if served is None else cost.share_of(served.median("tokens_per_s"))
        if share is not None:
            figures[f"share of served tokens/s, {row.model}"] = f"{share:.2%}"
    for column in figures:
        table.add_column(column, justify="right")
    table.add_row(*figures.values())
    return table


def _recovery(report: BenchReport) -> Table:
    table = Table(title="kill -9 of a core: seconds to the subscriber's next token")
    for column in ("engines", "requests", "p50", "p99", "max", "time to ready"):
        table.add_column(column, justify="right")
    for row in report.recoveries:
        shares = [percentile(row.seconds, share) for share in (0.5, 0.99, 1.0)]
        times = [f"{seconds:.2f}" for seconds in (*shares, row.ready_time_s)]
        engines = f"{row.num_engines} and a standby" if row.has_standby else str(row.num_engines)
        table.add_row(engines, str(len(row.seconds)), *times)
    if (memory := report.standby_memory) is not None:
        share = memory.standby_bytes / memory.weights_bytes
        table.caption = (
            f"with weights of {memory.weights_bytes >> 20:,} MiB: the standby takes "
            f"{memory.standby_bytes >> 20} MiB that no other process uses, {share:.1%} of the weights, and the keeper "
            f"of the weights {memory.keeper_bytes >> 20} MiB"
        )
    return table


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
