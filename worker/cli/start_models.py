"""``worker start`` with several models: they share the devices of this host."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from ...shared.process.command_line import print_if_read
from ...shared.process.log import configure_logging
from ...shared.process.service_manager import tell_ready
from ...shared.redis_access.embedded import given_or_embedded
from ...shared.tracing.endpoint import check_endpoint
from ..config.engine_config import EngineConfig
from ..config.worker_config import WorkerConfig
from ..keeper.lock import device_locks
from ..keeper.plan import SharedPlan, make_shared_plan
from ..keeper.sources import SharedSettings
from ..keeper.supervisor import ModelsSupervisor
from ..options.settings import effective_config
from ..other_engines.kinds import KINDS
from ..supervisor import EngineStartError
from ..supervisor.stat_loggers import StatLoggerManager, load_factories
from .host_services import check_installed, fork_server, metrics_server


def start_models(shared: SharedSettings, *, shows_config: bool) -> int:
    """Serve the models until stopped, and return the exit status."""
    if shows_config:
        print("\n".join(effective_config(entry.settings) for entry in shared.models), end="")
        return 0
    process = shared.settings.fields_of(WorkerConfig)
    configure_logging(process["log_level"], process["log_format"])
    for engine in {entry.settings.fields_of(EngineConfig)["engine"] for entry in shared.models}:
        check_installed(KINDS[engine].libraries, KINDS[engine].extra)
    if process["otlp_traces_endpoint"] is not None:
        check_endpoint(process["otlp_traces_endpoint"])
    plan = make_shared_plan(shared)
    with device_locks(plan):
        return _serve_plan(plan)


def _serve_plan(plan: SharedPlan) -> int:
    host = plan.host
    # Cores of all models are forked from one process, which imports what the first one needs.
    first = next(model for model in plan.models if not model.problem)

    def announce(awake: Sequence[str]) -> None:
        print_if_read(plan.ready_line(awake))
        tell_ready(plan.ready_line(awake))

    with (
        metrics_server(host) as metrics,
        given_or_embedded(host.redis_url) as redis_url,
        fork_server(host, first.engine, first.process) as fork_address,
    ):
        configs = plan.worker_configs(redis_url, fork_address)
        loggers = StatLoggerManager(
            [config for of_device in configs for config in of_device],
            load_factories(host.stat_loggers),
            interval_s=host.log_stats_interval_s,
            is_aggregated=host.aggregate_engine_logging,
        )
        try:
            is_clean_exit = asyncio.run(ModelsSupervisor(plan, configs, announce, metrics, loggers).run())
        except EngineStartError as error:
            sys.stderr.write(error.trace)
            raise
    return 0 if is_clean_exit else 1
