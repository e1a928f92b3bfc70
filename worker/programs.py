"""The programs with options, ``worker start`` and the engine alone on a workload file, and their options.

``python -m penstock.worker.programs`` prints the options as the site's tables.

Both programs may share a file of options: each uses its own and accepts keys of the other.
"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec

from ..shared.process.command_line import REDIS_URL_HELP, SHARDS_HELP
from ..shared.values.shown import MaskedRepr
from .config.engine_config import EngineConfig
from .config.fleet import FleetOptions
from .config.ranks import MAX_ENGINES_ON_HOST, PLACE
from .config.swap import SharingOptions
from .config.worker_config import BROKER, LOG, OBSERVING, PROCESS, WorkerConfig
from .options.numbers import Integer, IntegerOrRange, Seconds
from .options.option import Option
from .options.program import Program
from .options.readers import Choice, Indices, Name, Reader, Switch, SwitchOrText, Texts
from .options.settings import guide_table

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
        Option("GPUs to use; each engine takes one per rank", Indices(), default="every GPU", group=PLACE),
    ] = None
    engines: Annotated[
        int | str | None,
        Option(
            "number of engines on the CPU; with --ray the size of the fleet as MIN:MAX",
            IntegerOrRange(1, MAX_ENGINES_ON_HOST),
            default="1",
            group=PLACE,
        ),
    ] = None
    gpus_per_engine: Annotated[
        int,
        Option(
            "GPUs per engine if --engine-options give vLLM several; otherwise derived from its ranks",
            Integer(1, MAX_ENGINES_ON_HOST),
            group=PLACE,
        ),
    ] = 1
    fork_server: Annotated[
        bool | str | None,
        Option(
            "fork engine cores from a process that has imported torch, and worker processes from another one: "
            "engines restart seconds sooner and share memory; SOCKET: that of the cores' fork server, run by "
            "another process together with the second one",
            SwitchOrText("SOCKET"),
            default="yes",
            group=PROCESS,
        ),
    ] = None
    worker_name: Annotated[
        str | None,
        Option(
            "name of this worker in metrics, the same after restarts; its engines are NAME-0, NAME-1 and so on; "
            "each worker of a host needs its own",
            Name(),
            default="the host's name",
            group=OBSERVING,
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        Option(
            "port for /metrics of the engines, /healthz and /readyz; 0: a free one, shown in the log",
            Integer(0, 65_535),
            default="none",
            group=OBSERVING,
        ),
    ] = None
    metrics_host: Annotated[
        str, Option("address of that port; 0.0.0.0: all IPv4 interfaces", Reader("HOST"), group=OBSERVING)
    ] = "127.0.0.1"
    metric_names: Annotated[
        str, Option("vllm: vLLM's names in addition to Penstock's", Choice("penstock", "vllm"), group=OBSERVING)
    ] = "penstock"
    log_stats_interval_s: Annotated[
        float,
        Option(
            "interval of log lines about each busy engine; 0: never",
            Seconds(0),
            name="log_stats_interval",
            group=LOG,
        ),
    ] = 10.0
    aggregate_engine_logging: Annotated[bool, Option("one such line for all engines together", Switch(), group=LOG)] = (
        False
    )
    stat_loggers: Annotated[
        tuple[str, ...],
        Option(
            "factory of loggers that get the same values, as MODULE:NAME; may be repeated",
            Texts("MODULE:NAME"),
            name="stat_logger",
            group=LOG,
        ),
    ] = ()


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Files that a run of the engine alone reads and writes."""

    workload: Annotated[str, Option("JSON file with the requests", Reader("FILE"), group=_RUN)]
    output: Annotated[str, Option("JSON file to write", Reader("FILE"), group=_RUN)]
    steps: Annotated[bool, Option("include the work and duration of each step in the output", Switch(), group=_RUN)] = (
        False
    )


START = Program(
    "worker start",
    (EngineConfig, HostOptions, FleetOptions, SharingOptions, WorkerConfig),
    defaults=(("device", None, "every GPU, else the CPU"),),
)
OFFLINE = Program("python -m penstock.worker.engine.offline", (RunOptions, EngineConfig))
PROGRAMS = (START, OFFLINE)


def guide_tables() -> str:
    """Return all options as tables for ops/guide/reference/configuration.md."""
    run = Program(OFFLINE.name, (RunOptions,))
    return f"{guide_table(START)}\n{guide_table(run)}"


if __name__ == "__main__":
    sys.stdout.write(guide_tables())
