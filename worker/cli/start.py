"""``worker start``: serve a model on this host until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from ...shared.errors import ConfigurationError
from ...shared.process.command_line import Command, UsageError, print_if_read
from ...shared.process.log import configure_logging
from ...shared.process.service_manager import tell_ready
from ...shared.redis_access.embedded import given_or_embedded
from ...shared.tracing.endpoint import check_endpoint
from ...shared.values.distribution import install_command
from ..config.engine_config import EngineConfig
from ..config.fleet import FleetOptions
from ..config.worker_config import WorkerConfig
from ..models.checkpoint.folder import check_local_model
from ..models.checkpoint.stored_path import is_stored
from ..options.settings import Settings, effective_config, read_settings
from ..other_engines.kinds import KINDS
from ..programs import PROGRAMS, START, HostOptions
from .plan import make_plan, num_engines_of

if TYPE_CHECKING:
    from ..supervisor.host_metrics import MetricsServer


def _run_start(arguments: argparse.Namespace) -> int:
    settings = read_settings(START, PROGRAMS, arguments, os.environ)
    if arguments.show_config:
        print(effective_config(settings), end="")
        return 0
    settings.require()
    process = settings.fields_of(WorkerConfig)
    configure_logging(process["log_level"], process["log_format"])
    if settings.make(FleetOptions).ray is not None:
        # Imported late, as the supervisor below.
        from ..fleet.run import serve_fleet

        return serve_fleet(settings)
    _check_no_fleet(settings)
    kind = KINDS[settings.fields_of(EngineConfig)["engine"]]
    _check_installed(kind.libraries, kind.extra)
    if process["otlp_traces_endpoint"] is not None:
        check_endpoint(process["otlp_traces_endpoint"])
    return _serve(settings, process)


def _serve(settings: Settings, process: dict[str, Any]) -> int:
    # Imported late, because it needs psutil, and `worker --help` must work without it.
    from ..supervisor import EngineStartError, Supervisor
    from ..supervisor.stat_loggers import StatLoggerManager

    plan = make_plan(settings)
    host = plan.host

    def announce() -> None:
        print_if_read(plan.ready_line)
        tell_ready(plan.ready_line)

    with (
        _metrics_server(host) as metrics,
        given_or_embedded(host.redis_url) as redis_url,
        _fork_server(host, plan.engine, process) as fork_server,
    ):
        config = partial(plan.worker_config, redis_url=redis_url, fork_server=fork_server, process=process)
        try:
            configs = [config(index) for index in range(len(plan.placements))]
            loggers = StatLoggerManager(
                configs,
                plan.factories,
                interval_s=host.log_stats_interval_s,
                is_aggregated=host.aggregate_engine_logging,
                make_config=config,
            )
            supervisor = Supervisor(configs, announce, metrics, loggers, config, plan.num_places)
            is_clean_exit = asyncio.run(supervisor.run())
        except EngineStartError as error:
            sys.stderr.write(error.trace)
            raise
    return 0 if is_clean_exit else 1


def _metrics_server(host: HostOptions) -> AbstractContextManager[MetricsServer | None]:
    """Open the port for metrics and probes, before any process is started, so that a used port fails early."""
    if host.metrics_port is None:
        return nullcontext()
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError(f"--metrics-port needs prometheus_client: {install_command('worker')}")
    from ..supervisor.host_metrics import MetricsServer

    return closing(MetricsServer(host.metrics_host, host.metrics_port, host.metric_names))


def _fork_server(host: HostOptions, engine: EngineConfig, process: dict[str, Any]) -> AbstractContextManager[str]:
    """Run the fork server of engine cores, and return its socket; empty if cores are started as new processes."""
    from ..supervisor.fork_server import running_fork_server

    if not KINDS[engine.engine].can_fork:
        return nullcontext("")
    # Another process may run one for many workers, as the tests do.
    if isinstance(host.fork_server, str):
        return nullcontext(host.fork_server)
    if host.fork_server is False and process["standby"]:
        raise UsageError("--standby shares weights by forking; leave --no-fork-server out")
    if host.fork_server is False or (host.fork_server is None and engine.device != "cpu"):
        return nullcontext("")
    log_options = ("--log-level", process["log_level"], "--log-format", process["log_format"])
    return running_fork_server((*log_options, *_preload_options(engine)))


def _preload_options(engine: EngineConfig) -> Sequence[str]:
    """Return the options that tell the fork server what the cores will need."""
    model = check_local_model(engine.model, needs_weights=engine.needs_weights)
    if model is None:
        return ()
    if is_stored(engine, model):
        return ("--without-transformers",)
    return ("--model", engine.model) if model.is_dir() else ()


def _check_no_fleet(settings: Settings) -> None:
    for setting in settings.all:
        if setting.declared.struct is FleetOptions and setting.value != setting.declared.default:
            raise UsageError(f"{setting.source} is for a fleet; give --ray as well, or leave it out")
    num_engines_of(settings.make(HostOptions))


def _check_installed(libraries: Sequence[str], extra: str) -> None:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"worker start requires {', '.join(missing)}, which a client installation lacks; {install_command(extra)}"
        )


COMMAND = Command("start", "Serve a model on this host.", run=_run_start, add_arguments=START.add_arguments)
