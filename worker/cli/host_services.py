"""Services that a worker runs beside its supervisor: the port for metrics, and fork servers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

from ...shared.errors import ConfigurationError
from ...shared.process.command_line import UsageError
from ...shared.values.distribution import install_command
from ..config.engine_config import EngineConfig
from ..models.checkpoint.folder import check_local_model
from ..models.checkpoint.stored_path import is_stored
from ..other_engines.kinds import KINDS
from ..programs import HostOptions

if TYPE_CHECKING:
    from ..supervisor.host_metrics import MetricsServer


def metrics_server(host: HostOptions) -> AbstractContextManager[MetricsServer | None]:
    """Open the port for metrics and probes, before any process is started, so that a used port fails early."""
    if host.metrics_port is None:
        return nullcontext()
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError(f"--metrics-port needs prometheus_client: {install_command('worker')}")
    from ..supervisor.host_metrics import MetricsServer

    return closing(MetricsServer(host.metrics_host, host.metrics_port, host.metric_names))


def fork_server(host: HostOptions, engine: EngineConfig, process: dict[str, Any]) -> AbstractContextManager[str]:
    """Run the fork server of engine cores, and return its socket; empty if cores are started as new processes."""
    from ..supervisor.fork_server import running_fork_server

    if not KINDS[engine.engine].can_fork:
        return nullcontext("")
    # Another process may run one for many workers, as the tests do.
    if isinstance(host.fork_server, str):
        return nullcontext(host.fork_server)
    if host.fork_server is False and process["standby"]:
        raise UsageError("--standby shares weights by forking; leave --no-fork-server out")
    if host.fork_server is False:
        return nullcontext("")
    log_options = ("--log-level", process["log_level"], "--log-format", process["log_format"])
    return running_fork_server((*log_options, *_preload_options(engine)))


def _preload_options(engine: EngineConfig) -> Sequence[str]:
    """Return the options for the imports of the fork server, which cores will need."""
    model = check_local_model(engine.model, needs_weights=engine.needs_weights)
    if model is None:
        return ()
    if is_stored(engine, model):
        return ("--without-transformers",)
    return ("--model", engine.model) if model.is_dir() else ()


def check_installed(libraries: Sequence[str], extra: str) -> None:
    """Raise ``ConfigurationError`` if this environment lacks one of the packages."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"worker start requires {', '.join(missing)}, which a client installation lacks; {install_command(extra)}"
        )
