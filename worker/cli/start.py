"""``worker start``: serve a model on this host until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...shared.command_line import Command, UsageError
from ...shared.embedded import given_or_embedded
from ...shared.errors import ConfigurationError
from ...shared.keys import check_name
from ...shared.log import configure_logging
from ...shared.service_manager import tell_ready
from ...shared.shards import shards_text
from ...shared.tracing.endpoint import check_endpoint
from ..config import MAX_ENGINES_ON_HOST, EngineConfig
from ..engines.kinds import KINDS
from ..fleet_options import FleetOptions
from ..options.settings import Settings, read_settings
from ..options.told import effective_config
from ..programs import PROGRAMS, START, HostOptions
from ..worker_config import WorkerConfig
from .groups import group_engines

if TYPE_CHECKING:
    from ..supervisor import Placement
    from ..supervisor.host_metrics import MetricsServer


def _run(arguments: argparse.Namespace) -> int:
    settings = read_settings(START, PROGRAMS, arguments, os.environ)
    if arguments.show_config:
        print(effective_config(settings), end="")
        return 0
    settings.require()
    process = settings.fields_of(WorkerConfig)
    configure_logging(process["log_level"], process["log_format"])
    if settings.make(FleetOptions).ray is not None:
        # Imported late, as what serves on this host is.
        from ..fleet.run import serve_fleet

        return serve_fleet(settings)
    _check_no_fleet(settings)
    kind = KINDS[settings.fields_of(EngineConfig)["engine"]]
    _check_installed(kind.libraries, kind.extra)
    if process["otlp_traces_endpoint"] is not None:
        check_endpoint(process["otlp_traces_endpoint"])
    return _serve(settings, process)


def _serve(settings: Settings, process: dict[str, Any]) -> int:
    # Imported late: it needs psutil, and `worker --help` should say so rather than fail.
    from ..supervisor import EngineStartError, Supervisor, place_engines
    from ..supervisor.stat_loggers import StatLoggerManager, load_factories

    host, given = settings.make(HostOptions), settings.fields_of(EngineConfig)
    with settings.naming_sources():
        device = given["device"] or KINDS[given["engine"]].device
        placements = place_engines(host.gpus, device, _num_engines(host), *_gpus_per_engine(host, given))
        on_host = {"device": placements[0].device, "num_engines_on_host": len(placements)}
        engine = EngineConfig(**{**given, **on_host})
        check_name("the model's name (--served-model-name)", engine.model_name)
        kind = KINDS[engine.engine]
        _check_gpus_per_engine(host, engine)
        kind.check(engine)
        factories = load_factories(host.stat_loggers)
        name = host.worker_name or socket.gethostname()
        engines = group_engines(engine, len(placements), name)
    where = ", ".join(dict.fromkeys(map(str, placements)))
    count = f"{len(placements)} engine{'s' if len(placements) > 1 else ''}"

    def announce() -> None:
        line = f"ready: model {engine.model_name} on {count}, {where}{_chosen(engine)}"
        print(line, flush=True)
        tell_ready(line)

    # In containers a name and a process id come again. What the one before has claimed must not look like ours.
    worker_id = f"{name}-{os.getpid()}-{secrets.token_hex(2)}"
    with (
        _metrics_server(host) as metrics,
        given_or_embedded(host.redis_url) as redis_url,
        _fork_server(host, engine, process) as fork_server,
    ):

        def config(index: int) -> WorkerConfig:
            placement = placements[index] if index < len(placements) else placements[0]
            # One that joins later takes its share of the processors; those that run keep theirs.
            num_engines = max(index + 1, len(placements))
            return WorkerConfig(
                worker_id=worker_id,
                engine_id=f"{worker_id}-{index}",
                engine_name=f"{name}-{index}",
                redis_url=redis_url,
                shards=shards_text(host.shards or ""),
                engine=msgspec.structs.replace(engines[min(index, len(engines) - 1)], num_engines_on_host=num_engines),
                visible_devices=placement.visible_devices,
                supervisor_pid=os.getpid(),
                fork_server=fork_server,
                **process,
            )

        try:
            configs = [config(index) for index in range(len(placements))]
            loggers = StatLoggerManager(
                configs,
                factories,
                interval_s=host.log_stats_interval_s,
                is_aggregated=host.aggregate_engine_logging,
                make_config=config,
            )
            supervisor = Supervisor(configs, announce, metrics, loggers, config, _room(placements))
            left_in_order = asyncio.run(supervisor.run())
        except EngineStartError as error:
            sys.stderr.write(error.trace)
            raise
    return 0 if left_in_order else 1


def _room(placements: Sequence[Placement]) -> int:
    """How many engines there is a place for: GPUs have one each, processors as many as are wanted."""
    return len(placements) if placements[0].visible_devices is not None else MAX_ENGINES_ON_HOST


def _gpus_per_engine(host: HostOptions, given: dict[str, Any]) -> tuple[int, str]:
    """How many, and which options say so."""
    sizes = {name: given[name] for name in ("tensor_parallel_size", "pipeline_parallel_size") if given[name] > 1}
    num_ranks = math.prod(sizes.values())
    told_by = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
    if num_ranks == 1:
        return host.gpus_per_engine, f"--gpus-per-engine {host.gpus_per_engine}"
    if host.gpus_per_engine not in (1, num_ranks):
        raise UsageError(
            f"--gpus-per-engine {host.gpus_per_engine} contradicts {told_by}, which needs {num_ranks}; leave it out"
        )
    return num_ranks, told_by


def _check_gpus_per_engine(host: HostOptions, engine: EngineConfig) -> None:
    """Nothing but vLLM, which has options of its own, has more GPUs than the ranks that it was told to have."""
    if host.gpus_per_engine <= engine.num_ranks or engine.engine == "vllm":
        return
    count = host.gpus_per_engine
    instead = f"give --tensor-parallel-size {count}" if KINDS[engine.engine].has_ranks else "leave it out"
    raise UsageError(f"--gpus-per-engine {count}: an engine of {engine.engine} has a GPU for each rank; {instead}")


def _metrics_server(host: HostOptions) -> AbstractContextManager[MetricsServer | None]:
    """The port for metrics and probes, open before anything is started: one that is taken is soon known."""
    if host.metrics_port is None:
        return nullcontext()
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError("--metrics-port needs prometheus_client: pip install 'penstock[worker]'")
    from ..supervisor.host_metrics import MetricsServer

    return closing(MetricsServer(host.metrics_host, host.metrics_port, host.metric_names))


def _fork_server(host: HostOptions, engine: EngineConfig, process: dict[str, Any]) -> AbstractContextManager[str]:
    """The socket of the process that forks engine cores, while it runs; empty if each is started by itself."""
    from ..supervisor.fork_server import running_fork_server

    if not KINDS[engine.engine].can_fork:
        return nullcontext("")
    # Somebody may keep one for all: the tests do, whose workers are many and short-lived.
    if isinstance(host.fork_server, str):
        return nullcontext(host.fork_server)
    if host.fork_server is False or (host.fork_server is None and engine.device != "cpu"):
        return nullcontext("")
    preloaded = ("--model", engine.model) if Path(engine.model).is_dir() else ()
    return running_fork_server(("--log-level", process["log_level"], "--log-format", process["log_format"], *preloaded))


def _chosen(engine: EngineConfig) -> str:
    """What was chosen otherwise than by default, of what changes speed and rounding, for the line that says ready."""
    options = {
        "engine": engine.engine if engine.engine != "penstock" else None,
        "attention": engine.attention_backend if engine.attention_backend != "auto" else None,
        "KV cache in": engine.eight_bit_cache,
        "weights in": engine.quantization,
    }
    return "".join(f", {name} {value}" for name, value in options.items() if value is not None)


def _check_no_fleet(settings: Settings) -> None:
    for setting in settings.all:
        if setting.declared.struct is FleetOptions and setting.value != setting.declared.default:
            raise UsageError(f"{setting.source} is for a fleet; give --ray as well, or leave it out")
    _num_engines(settings.make(HostOptions))


def _num_engines(host: HostOptions) -> int | None:
    if isinstance(host.engines, str):
        raise UsageError(f"--engines {host.engines} is for a fleet; give --ray as well, or one number")
    return host.engines


def _check_installed(libraries: Sequence[str], extra: str) -> None:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"worker start needs {', '.join(missing)}, which a plain client does without; "
            f"pip install 'penstock[{extra}]'"
        )


COMMAND = Command("start", "Serve a model on this host.", run=_run, add_arguments=START.add_arguments)
