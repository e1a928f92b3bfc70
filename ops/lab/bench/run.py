"""`penstock bench`: measures the chosen rows, prints tables and goals, writes the JSON.

``--only`` selects the rows. Those about the queue are in ``queue/``, those about engines and rivals in ``engines/``:
every side runs one workload in turn, from the start of its process to its end, in alternating rounds, so that a drift
of the machine's speed affects all. Ratios are computed per round; their median is reported. A side with wrong tokens
(``judge.py``) has no speed, and the exit status is 1. It is also 1 when a row fails, which does not affect the others.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from ....shared.errors import ConfigurationError
from ...demo.run import MODEL as DEMO_MODEL
from ...local.stack import private_redis
from .engines.gateway_row import measure_gateway
from .engines.growth import measure_growth
from .engines.pooling import NUM_TEXTS, measure_pooling
from .engines.roofline import measure_bandwidth
from .engines.row import EngineWork, measure_model
from .engines.sessions import measure_sessions
from .engines.sides import adapter_sides, choose_sides, named_sides
from .lora.row import choose_engines, measure_lora
from .other_load import LoadWatch
from .queue.costs import measure_costs
from .queue.durability import BATCH_SIZE, durability_cost
from .queue.enqueue import measure_enqueue
from .queue.fairness import measure_fairness
from .queue.figures import measure_figures
from .queue.fleet import measure_fleet
from .queue.follow import measure_follow
from .queue.idle import measure_idle
from .queue.ledger import measure_ledger
from .queue.recovery import measure_recovery, measure_standby_memory
from .queue.scale import measure_scale
from .report import BANDWIDTH, BenchReport, all_goals, engine_label, machine, print_report, versions, write_report
from .speculation.row import learn_answers, measure_speculation
from .speculation.sides import InTurns, rivals

GROWTH_MODEL = "tiny"
POOLING_MODEL = "minilm"
LORA_MODEL = "smol135"
STANDBY_MODEL = "qwen06"
SPECULATION_MODEL = "smol135"
# A round of it takes seconds.
GATEWAY_ROUNDS = 3
WIDTH = 160


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the benchmark; see ``penstock bench --help``. ``threads`` 0 lets the engine choose."""

    rows: frozenset[str]
    models: list[str]
    peers: frozenset[str]
    peers_folder: Path
    num_requests: int
    num_single: int
    requests_per_s: float
    rounds: int
    seed: int
    threads: int
    engine_options: list[str]
    queue_depth: int
    json_path: Path
    sides: list[str] = msgspec.field(default_factory=list)

    def options_of_engines(self) -> list[str]:
        """Options of ``worker start``, which are those of the engine alone as well."""
        # The served engine would reuse the warm-up's prompts, while no rival caches them.
        options = ["--no-enable-prefix-caching", *self.engine_options]
        return [*options, "--threads", str(self.threads)] if self.threads else options


def run_bench(options: BenchOptions) -> int:
    """Measure the chosen rows and print the tables. Return 1 if a side's tokens were wrong or a row failed.

    The JSON is rewritten after each row, so that later failures do not lose earlier results.
    """
    # Into a file as well the tables keep their columns whole.
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    report = BenchReport(machine=machine(), versions=versions(), seed=options.seed, command=sys.argv[1:])
    with _run_folder() as folder:
        for row in _chosen_rows(options, report, folder, console):
            console.print(row.say)
            with LoadWatch(folder) as watch, report.telling_failures(row.label):
                row.measure()
            if watch.found is not None:
                report.other_load[row.label] = watch.found
            write_report(report, options.json_path)
    report.goals = all_goals(report)
    print_report(console, report)
    write_report(report, options.json_path)
    console.print(f"written to {options.json_path}")
    judged = [*report.engines, *([report.adapter] if report.adapter is not None else [])]
    is_wrong = any(side.wrong for row in judged for side in row.sides)
    return 1 if is_wrong or report.failures else 0


@contextmanager
def _run_folder() -> Iterator[Path]:
    """Yield a folder for all temporary files of the run, which identifies its servers (``other_load``)."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


class _Row(NamedTuple):
    """A unit of measurement. ``label`` is its name in the report, ``name`` that of ``--only``."""

    name: str
    label: str
    say: str
    measure: Callable[[], None]


def _chosen_rows(options: BenchOptions, report: BenchReport, scratch: Path, console: Console) -> list[_Row]:
    """Return the chosen rows, each of which adds its results to ``report``."""
    engines = [
        _Row(
            "engine",
            engine_label(name),
            f"{name} …",
            partial(_measure_engines, name, options, report, scratch, console),
        )
        for name in options.models
    ]
    rows = [
        _Row("engine", BANDWIDTH, "measuring the bandwidth of memory …", partial(_measure_bandwidth, report)),
        *engines,
        *(_Row(name, name, say, measure) for name, say, measure in _other_rows(options, report, scratch, console)),
    ]
    return [row for row in rows if row.name in options.rows]


def _other_rows(
    options: BenchOptions, report: BenchReport, scratch: Path, console: Console
) -> list[tuple[str, str, Callable[[], None]]]:
    """Yield each row's name, its announcement, and a function that adds its results to ``report``."""

    def gateway() -> None:
        model = model_folder(GROWTH_MODEL, scratch)
        rivals = choose_sides(options.peers, options.peers_folder, [])
        rounds = GATEWAY_ROUNDS * options.rounds
        engines = options.options_of_engines()
        report.gateway = measure_gateway(
            GROWTH_MODEL, model, engines, rivals, rounds, options.seed, scratch, console.print
        )

    def adapter() -> None:
        sides = adapter_sides(options.peers_folder, options.options_of_engines())
        model = model_folder(GROWTH_MODEL, scratch)
        report.adapter = measure_model(GROWTH_MODEL, model, sides, _work(GROWTH_MODEL, options), scratch, console.print)

    def growth() -> None:
        model = model_folder(GROWTH_MODEL, scratch)
        report.growth = measure_growth(GROWTH_MODEL, model, options.options_of_engines(), scratch, options.seed)

    def sessions() -> None:
        model = model_folder(GROWTH_MODEL, scratch)
        report.sessions = measure_sessions(GROWTH_MODEL, model, scratch, options.rounds, options.seed)

    def durability() -> None:
        with private_redis(append_only=True) as url:
            report.durability = asyncio.run(durability_cost(url, options.num_requests or BATCH_SIZE))

    def recovery() -> None:
        report.recoveries = [measure_recovery(2), measure_recovery(1), measure_recovery(1, has_standby=True)]
        report.standby_memory = measure_standby_memory(model_folder(STANDBY_MODEL, scratch))

    def follow() -> None:
        report.follow = measure_follow()

    return [
        ("adapter", "vLLM behind the queue …", adapter),
        ("gateway", "starting a gateway …", gateway),
        ("growth", "running ever larger batches …", growth),
        ("sessions", "holding conversations …", sessions),
        ("pooling", "embedding texts …", partial(_measure_pooling, options, report, scratch)),
        ("lora", "making adapters …", partial(_measure_lora, options, report, scratch, console)),
        (
            "speculation",
            "learning answers by heart, for a minute or two …",
            partial(_measure_speculation, options, report, scratch, console),
        ),
        ("durability", "appending …", durability),
        ("recovery", "killing engine cores …", recovery),
        *_queue_rows(options, report),
        ("follow", "following streams …", follow),
    ]


def _measure_pooling(options: BenchOptions, report: BenchReport, scratch: Path) -> None:
    report.pooling = measure_pooling(
        POOLING_MODEL,
        model_folder(POOLING_MODEL, scratch),
        options.options_of_engines(),
        scratch,
        num_texts=options.num_requests or NUM_TEXTS,
        rounds=options.rounds,
        seed=options.seed,
        threads=options.threads,
    )


def _measure_lora(options: BenchOptions, report: BenchReport, scratch: Path, console: Console) -> None:
    engines = choose_engines(options.peers, options.peers_folder, options.options_of_engines())
    work = _work(LORA_MODEL, options)
    report.lora = measure_lora(
        LORA_MODEL,
        model_folder(LORA_MODEL, scratch),
        engines,
        num_requests=work.num_requests,
        rounds=work.rounds,
        seed=work.seed,
        dtype=work.dtype,
        scratch=scratch,
        tell=console.print,
    )


def _measure_speculation(options: BenchOptions, report: BenchReport, scratch: Path, console: Console) -> None:
    # In a folder of its own: the other rows have the model as it was.
    model = model_folder(SPECULATION_MODEL, scratch / "speculation")
    learn_answers(model)
    pairs = [InTurns("ngram", options.options_of_engines()), *rivals(options.peers, options.peers_folder)]
    report.speculation = measure_speculation(SPECULATION_MODEL, model, pairs, options.rounds, scratch, console.print)


def _queue_rows(options: BenchOptions, report: BenchReport) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Yield the same for rows that need only Redis; each has a field of its name in ``report.queue``."""
    measured: dict[str, tuple[str, Callable[[], object]]] = {
        "enqueue": ("putting requests in line …", measure_enqueue),
        "scale": (
            f"filling a queue with {options.queue_depth:,} requests …",
            partial(measure_scale, options.queue_depth, options.seed),
        ),
        "fairness": ("flooding …", partial(measure_fairness, options.rounds, options.seed)),
        "idle": ("watching an idle worker …", measure_idle),
        "fleet": ("waking engines, one to 1,000 …", partial(measure_fleet, seed=options.seed)),
        "costs": ("what Redis spends on a request and a delta …", measure_costs),
        "figures": ("what events and series cost …", measure_figures),
        "ledger": ("what the ledger and budgets cost …", measure_ledger),
    }

    def fill(name: str, measure: Callable[[], object]) -> None:
        setattr(report.queue, name, measure())

    for name, (say, measure) in measured.items():
        yield name, say, partial(fill, name, measure)


def _measure_bandwidth(report: BenchReport) -> None:
    report.bandwidth = measure_bandwidth()


def _measure_engines(name: str, options: BenchOptions, report: BenchReport, scratch: Path, console: Console) -> None:
    chosen = choose_sides(options.peers, options.peers_folder, options.options_of_engines())
    sides = named_sides(chosen, options.sides)
    work = _work(name, options)
    report.engines.append(measure_model(name, model_folder(name, scratch), sides, work, scratch, console.print))


def _work(name: str, options: BenchOptions) -> EngineWork:
    return EngineWork(
        num_requests=options.num_requests or (16 if name == "qwen06" else 64),
        num_single=options.num_single,
        rounds=options.rounds,
        seed=options.seed,
        requests_per_s=options.requests_per_s,
        dtype="float32" if name == "demo" else "bfloat16",
    )


def model_folder(name: str, scratch: Path) -> Path:
    """Return the demo model, or a random model of a named shape, which is written into ``scratch`` if missing.

    Raises:
        ConfigurationError: no shape of that name.
    """
    if name == "demo":
        return DEMO_MODEL
    folder = scratch / name
    if folder.exists():
        return folder
    command = [sys.executable, "-m", "penstock.ops.lab.random_model", "--shape", name, "--out", str(folder)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise ConfigurationError(f"model {name!r} cannot be made: {completed.stderr.strip()}")
    return folder
