"""``worker start``: serve a model on this host until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial
from typing import Any

import structlog

from ...shared.process.command_line import Command, UsageError, print_if_read
from ...shared.process.log import configure_logging
from ...shared.process.service_manager import tell_ready
from ...shared.redis_access.embedded import given_or_embedded
from ...shared.tracing.endpoint import check_endpoint
from ..config.engine_config import EngineConfig
from ..config.fleet import FleetOptions
from ..config.worker_config import WorkerConfig
from ..keeper.sources import read_entries
from ..options.settings import Settings, effective_config, read_settings, shown_value
from ..other_engines.kinds import KINDS
from ..programs import PROGRAMS, START, HostOptions
from .host_services import check_installed, fork_server, metrics_server
from .plan import Plan, make_plan, num_engines_of

_REPORTS_ON_ENGINES = frozenset({"metrics_port", "stat_loggers"})

log = structlog.get_logger()


def _run_start(arguments: argparse.Namespace) -> int:
    settings = read_settings(START, PROGRAMS, arguments, os.environ)
    shared = read_entries(settings, arguments.model or [])
    if shared is not None:
        # Imported late, as the supervisor below.
        from .start_models import start_models

        return start_models(shared, shows_config=arguments.show_config)
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
    _check_reports(settings)
    kind = KINDS[settings.fields_of(EngineConfig)["engine"]]
    check_installed(kind.libraries, kind.extra)
    if process["otlp_traces_endpoint"] is not None:
        check_endpoint(process["otlp_traces_endpoint"])
    return _serve(settings, process)


def _serve(settings: Settings, process: dict[str, Any]) -> int:
    # Imported late, because it needs psutil, and `worker --help` must work without it.
    from ..supervisor import EngineStartError, Supervisor
    from ..supervisor.stat_loggers import StatLoggerManager

    plan = make_plan(settings)
    log.info("configuration", **{setting.declared.name: shown_value(setting) for setting in settings.all})
    if plan.engine.node_rank:
        return _run_ranks(plan)
    host = plan.host

    def announce() -> None:
        print_if_read(plan.ready_line)
        tell_ready(plan.ready_line)

    with (
        metrics_server(host) as metrics,
        given_or_embedded(host.redis_url) as redis_url,
        fork_server(host, plan.engine, process) as fork_address,
    ):
        config = partial(plan.worker_config, redis_url=redis_url, fork_server=fork_address, process=process)
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


def _run_ranks(plan: Plan) -> int:
    """Run the ranks of this host for the engine of another host, until it is stopped."""
    engine, devices = plan.engine, plan.placements[0].visible_devices
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    # Imported late, because it imports torch.
    from ..engine.ranks.host_agent import run_ranks

    line = f"ready: host {engine.node_rank} waits for model {engine.model_name} at {engine.master_addr}"

    def announce() -> None:
        print_if_read(line)
        tell_ready(line)

    run_ranks(engine, announce)
    return 0


def _check_no_fleet(settings: Settings) -> None:
    for setting in settings.all:
        if setting.declared.struct is FleetOptions and setting.value != setting.declared.default:
            raise UsageError(f"{setting.source} is for a fleet; give --ray as well, or leave it out")
    num_engines_of(settings.make(HostOptions))


def _check_reports(settings: Settings) -> None:
    """Refuse reports about engines on a host that only runs ranks for the engine of another host."""
    if not settings.fields_of(EngineConfig)["node_rank"]:
        return
    for setting in settings.all:
        if setting.declared.field in _REPORTS_ON_ENGINES and setting.value != setting.declared.default:
            raise UsageError(
                f"{setting.source} is for the host with the engine, node_rank 0, which also reports on the ranks of "
                "this one; leave it out here"
            )


COMMAND = Command("start", "Serve a model on this host.", run=_run_start, add_arguments=START.add_arguments)
