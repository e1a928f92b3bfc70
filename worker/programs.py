"""The programs with options, ``worker start`` and the engine alone on a workload file, and their options.

``python -m penstock.worker.programs`` prints the options as the guide's tables.

Both programs may share a file of options: each uses its own and accepts keys of the other.
"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec

from ..shared.process.command_line import REDIS_URL_HELP, SHARDS_HELP
from ..shared.values.urls import MaskedRepr
from .config.engine_config import EngineConfig
from .config.fleet import FleetOptions
from .config.place import MAX_ENGINES_ON_HOST, PLACE
from .config.worker_config import BROKER, LOG, OBSERVING, PROCESS, WorkerConfig
from .options.display import guide_table
from .options.numbers import Integer, Seconds
from .options.option import Option
from .options.program import Program
from .options.ranges import IntegerOrRange
from .options.readers import Choice, Indices, Name, Reader, Switch, SwitchOrText, Texts

_RUN = "a run of `penstock.worker.engine.offline`"


class HostOptions(MaskedRepr, msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``worker start`` for the host, from which it derives the configurations of processes."""

    redis_url: Annotated[
        str | None,
        Option(REDIS_URL_HELP, Reader("URL"), default="a private embedded Redis", group=BROKER, is_secret=True),
    ] = None
    shards: Annotated[str | None, Option(SHARDS_HELP, Reader("URLS"), default="none", group=BROKER, is_secret=True)] = (
        None
    )
    gpus: Annotated[
        tuple[int, ...] | None,
        Option("engines on these GPUs, each on as many as it has ranks", Indices(), default="every GPU", group=PLACE),
    ] = None
    engines: Annotated[
        int | str | None,
        Option(
            "number of engines on the CPU; with --ray the least and the most of the fleet, as LEAST:MOST",
            IntegerOrRange(1, MAX_ENGINES_ON_HOST),
            default="1",
            group=PLACE,
        ),
    ] = None
    gpus_per_engine: Annotated[
        int,
        Option(
            "GPUs of each engine, where --engine-options gives vLLM several; else its ranks say how many",
            Integer(1, MAX_ENGINES_ON_HOST),
            group=PLACE,
        ),
    ] = 1
    fork_server: Annotated[
        bool | str | None,
        Option(
            "start engine cores by forking a process that has imported torch, and worker processes by forking another: "
            "a dead engine is replaced seconds sooner, and several share memory; SOCKET: that of cores, which somebody "
            "else keeps with the other",
            SwitchOrText("SOCKET"),
            default="yes on the CPU, no on GPUs",
            group=PROCESS,
        ),
    ] = None
    worker_name: Annotated[
        str | None,
        Option(
            "what metrics call this worker, whose engines are NAME-0, NAME-1 and so on in all its lives; give each "
            "worker of a host another one",
            Name(),
            default="the host's name",
            group=OBSERVING,
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        Option(
            "serve /metrics of its engines, /healthz and /readyz at this port; 0: a free one, which the log tells",
            Integer(0, 65_535),
            default="none",
            group=OBSERVING,
        ),
    ] = None
    metrics_host: Annotated[
        str, Option("where that port is; 0.0.0.0: on all of IPv4", Reader("HOST"), group=OBSERVING)
    ] = "127.0.0.1"
    metric_names: Annotated[
        str, Option("vllm adds vLLM's names to our own", Choice("penstock", "vllm"), group=OBSERVING)
    ] = "penstock"
    log_stats_interval_s: Annotated[
        float,
        Option(
            "how often a line tells what an engine does while it has something to do; 0: never",
            Seconds(0),
            name="log_stats_interval",
            group=LOG,
        ),
    ] = 10.0
    aggregate_engine_logging: Annotated[bool, Option("one such line for all engines", Switch(), group=LOG)] = False
    stat_loggers: Annotated[
        tuple[str, ...],
        Option(
            "a factory of loggers that are told the same, as MODULE:NAME; may be given several times",
            Texts("MODULE:NAME"),
            name="stat_logger",
            group=LOG,
        ),
    ] = ()


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Files that a run of the engine alone reads and writes."""

    workload: Annotated[str, Option("JSON file with the requests", Reader("FILE"), group=_RUN)]
    output: Annotated[str, Option("JSON file to write", Reader("FILE"), group=_RUN)]
    steps: Annotated[bool, Option("tell of each step what it did and how long it took", Switch(), group=_RUN)] = False


START = Program(
    "worker start",
    (EngineConfig, HostOptions, FleetOptions, WorkerConfig),
    defaults=(("device", None, "every GPU, else the CPU"),),
)
OFFLINE = Program("python -m penstock.worker.engine.offline", (RunOptions, EngineConfig))
PROGRAMS = (START, OFFLINE)


def guide_tables() -> str:
    """Return all options as tables for ops/guide/configuration.md."""
    run = Program(OFFLINE.name, (RunOptions,))
    return f"{guide_table(START)}\n{guide_table(run)}"


if __name__ == "__main__":
    sys.stdout.write(guide_tables())
