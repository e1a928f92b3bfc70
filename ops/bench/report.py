"""The benchmark's table and JSON, with what one needs to judge them: machine, versions, seed, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..latency import percentile
from .durability import DurabilityCost
from .engine_report import engine_tables, follow_table, gateway_table, goals_table, growth_table
from .engine_row import EngineRow
from .follow import FollowRow
from .gateway_row import GatewayRow
from .goals import Goal, engine_goals, enqueue_goals, follow_goals, gateway_goals, growth_goals
from .growth import GrowthRow
from .queue_report import QueueRows, queue_tables
from .recovery import Recovery
from .roofline import Bandwidth
from .sides import SERVED

LIBRARIES = ("penstock", "torch", "transformers", "redis", "hiredis", "msgspec", "uvloop", "arq")


class BenchReport(msgspec.Struct, kw_only=True):
    """All rows that were chosen, and where they come from. The versions of rivals are with their sides.

    ``failures`` says what ended a row before it had been measured.
    """

    machine: dict[str, str]
    versions: dict[str, str]
    seed: int
    command: list[str]
    bandwidth: Bandwidth | None = None
    engines: list[EngineRow] = []
    failures: dict[str, str] = {}
    gateway: GatewayRow | None = None
    growth: GrowthRow | None = None
    follow: FollowRow | None = None
    durability: DurabilityCost | None = None
    recoveries: list[Recovery] = []
    queue: QueueRows = msgspec.field(default_factory=QueueRows)
    goals: list[Goal] = []


def machine() -> dict[str, str]:
    """What ran this: processor, cores, memory, system; and how busy others kept it in the minute before."""
    return {
        "processor": _processor_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.0f}",
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_1min_before": f"{os.getloadavg()[0]:.2f}",
    }


def versions() -> dict[str, str]:
    """Library versions and the commit, where this is a checkout."""
    found = {name: metadata.version(name) for name in LIBRARIES if _installed(name)}
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return found | {"commit": done.stdout.strip() or "unknown"}


def print_report(console: Console, report: BenchReport) -> None:
    """Print the tables of what was measured, and last the goals."""
    for row in report.engines:
        for table in engine_tables(row, report.bandwidth):
            console.print(table)
    if report.gateway is not None:
        console.print(gateway_table(report.gateway))
    if report.growth is not None:
        console.print(growth_table(report.growth))
    if report.follow is not None:
        console.print(follow_table(report.follow))
    if report.durability is not None:
        console.print(_durability(report, report.durability))
    if report.recoveries:
        console.print(_recovery(report))
    for table in queue_tables(report.queue):
        console.print(table)
    if report.goals:
        console.print(goals_table(report.goals))
    for row, reason in report.failures.items():
        console.print(f"not measured: {row}: {escape(reason)}", style="red")


def all_goals(report: BenchReport) -> list[Goal]:
    """Of the rows that were chosen; further ones of the queue stand in its own tables."""
    goals = [goal for row in report.engines for goal in engine_goals(row)]
    if report.gateway is not None:
        goals += gateway_goals(report.gateway)
    if report.growth is not None:
        goals += growth_goals(report.growth)
    if report.follow is not None:
        goals += follow_goals(report.follow)
    if report.queue.enqueue is not None:
        goals += enqueue_goals(report.queue.enqueue)
    return goals


def _durability(report: BenchReport, cost: DurabilityCost) -> Table:
    table = Table(title=f"durability, ms per step of {cost.batch_size} requests")
    figures = {"append: log, fence, publish": f"{cost.append_ms:.2f}", "publish only": f"{cost.publish_ms:.2f}"}
    for row in report.engines:
        served = row.side(SERVED)
        tokens_per_s = None if served is None else served.median("tokens_per_s")
        if tokens_per_s is not None:
            figures[f"share of served tokens/s, {row.model}"] = f"{cost.share_of(tokens_per_s):.2%}"
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
        table.add_row(str(row.num_engines), str(len(row.seconds)), *times)
    return table


def _processor_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
