"""``worker start``: serve a model on this host until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...shared.command_line import Command, UsageError
from ...shared.embedded import given_or_embedded
from ...shared.errors import ConfigurationError
from ...shared.keys import check_name
from ...shared.log import configure_logging
from ...shared.service_manager import tell_ready
from ...shared.shards import shards_text
from ...shared.tracing.endpoint import check_endpoint
from ..config import EngineConfig
from ..engines.kinds import KINDS
from ..options.settings import Settings, read_settings
from ..options.told import effective_config
from ..programs import PROGRAMS, START, HostOptions
from ..worker_config import WorkerConfig
from .groups import group_engines

if TYPE_CHECKING:
    from ..supervisor.host_metrics import MetricsServer


def _run(arguments: argparse.Namespace) -> int:
    settings = read_settings(START, PROGRAMS, arguments, os.environ)
    if arguments.show_config:
        print(effective_config(settings), end="")
        return 0
    settings.require()
    process = settings.fields_of(WorkerConfig)
    configure_logging(process["log_level"], process["log_format"])
    kind = KINDS[settings.fields_of(EngineConfig)["engine"]]
    _check_installed(kind.libraries, kind.extra)
    if process["otlp_traces_endpoint"] is not None:
        check_endpoint(process["otlp_traces_endpoint"])
    return _serve(settings, process)


def _serve(settings: Settings, process: dict[str, Any]) -> int:
    # Imported late: it needs psutil, and `worker --help` should say so rather than fail.
    from ..supervisor import EngineStartError, Placement, Supervisor, place_engines
    from ..supervisor.stat_loggers import StatLoggerManager, load_factories

    host, given = settings.make(HostOptions), settings.fields_of(EngineConfig)
    with settings.naming_sources():
        device = given["device"] or KINDS[given["engine"]].device
        placements = place_engines(host.gpus, device, host.engines, host.gpus_per_engine)
        on_host = {"device": placements[0].device, "num_engines_on_host": len(placements)}
        engine = EngineConfig(**{**given, **on_host})
        check_name("the model's name (--served-model-name)", engine.model_name)
        kind = KINDS[engine.engine]
        if host.gpus_per_engine > 1 and not kind.has_ranks:
            raise UsageError(f"--gpus-per-engine {host.gpus_per_engine}: an engine of {engine.engine} has one GPU")
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

        def config(index: int, placement: Placement) -> WorkerConfig:
            return WorkerConfig(
                worker_id=worker_id,
                engine_id=f"{worker_id}-{index}",
                engine_name=f"{name}-{index}",
                redis_url=redis_url,
                shards=shards_text(host.shards or ""),
                engine=engines[index],
                visible_devices=placement.visible_devices,
                supervisor_pid=os.getpid(),
                fork_server=fork_server,
                **process,
            )

        try:
            configs = [config(index, placement) for index, placement in enumerate(placements)]
            loggers = StatLoggerManager(
                configs,
                factories,
                interval_s=host.log_stats_interval_s,
                is_aggregated=host.aggregate_engine_logging,
            )
            left_in_order = asyncio.run(Supervisor(configs, announce, metrics, loggers).run())
        except EngineStartError as error:
            sys.stderr.write(error.trace)
            raise
    return 0 if left_in_order else 1


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


def _check_installed(libraries: Sequence[str], extra: str) -> None:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"worker start needs {', '.join(missing)}, which a plain client does without; "
            f"pip install 'penstock[{extra}]'"
        )


COMMAND = Command("start", "Serve a model on this host.", run=_run, add_arguments=START.add_arguments)
