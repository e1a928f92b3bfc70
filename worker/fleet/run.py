"""``worker start --ray``: from its options to a fleet that serves."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from typing import Any

import structlog

from ...shared.deployment.presence import Presence, ProcessKind
from ...shared.errors import ConfigurationError
from ...shared.keys import Keys
from ...shared.process.command_line import UsageError
from ...shared.process.service_manager import tell_ready, tell_stopping
from ...shared.redis_access.url import parse_pool
from ...shared.shards import check_servers, make_commands, shards_text
from ...shared.values.distribution import install_command
from ...shared.values.names import check_name
from ..config.engine_config import EngineConfig
from ..config.fleet import FleetOptions
from ..config.worker_config import WorkerConfig
from ..options.numbers import bounds
from ..options.settings import Setting, Settings
from ..other_engines.kinds import KINDS
from ..programs import HostOptions
from .backend import AgentSpec, FleetBackend
from .demand import Demand
from .fleet import Fleet
from .scaling import ScalingOptions

# How long the fleet waits for an unreachable Redis before it skips a tick.
RETRY_FOR_S = 5.0
# Options that give an engine several ranks.
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size")
# Options that an agent decides itself, or that do not apply to it.
_NOT_PASSED_ON = ("engines", "worker_name", "device", "threads")
# Options that the agents of an engine over several hosts choose.
_OF_HOSTS = ("node_rank", "master_addr", "master_port")

log = structlog.get_logger()


def serve_fleet(settings: Settings) -> int:
    """Run a fleet on a Ray cluster until it is stopped, and return the exit status.

    Raises:
        UsageError, ConfigurationError: options contradict each other, or the cluster is unreachable.
        RedisUnavailableError, RedisUnsupportedError: Redis cannot be used.
        FleetStartError: an engine could not start before any had served.
    """
    options, process = settings.make(FleetOptions), settings.fields_of(WorkerConfig)
    host, scaling = _check_options(settings, options)
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError(f"--ray requires Ray, which is not installed: {install_command('ray')}")
    # Imported late, because it loads Ray, which takes long.
    from .ray_backend import GivenGroup, OwnGroups, RayBackend, connected, has_gpus

    assert options.ray is not None
    with connected(options.ray):
        fields = settings.fields_of(EngineConfig)
        device = fields["device"] or KINDS[fields["engine"]].device or ("cuda" if has_gpus() else "cpu")
        num_hosts = fields["nnodes"]
        with settings.naming_sources():
            engine = EngineConfig(
                **{**fields, "device": device, "master_addr": "the first host" if num_hosts > 1 else ""}
            )
            check_name("the model's name (--served-model-name)", engine.model_name)
        resources = resources_of(settings, device)
        name = f"penstock-{engine.model_name}"
        group = options.placement_group
        bundles = OwnGroups(name, num_hosts) if group is None else GivenGroup(group, resources)
        if bundles.most is not None and bundles.most < scaling.least:
            raise UsageError(
                f"--engines {host.engines}: --ray-placement-group {group} has room for {bundles.most} engines"
            )
        backend = RayBackend(f"Ray at {options.ray}", bundles, resources, num_hosts)
        spec = AgentSpec(
            worker_name=host.worker_name or f"{engine.model_name}-ray",
            options=passed_on(settings, device, int(resources["CPU"])),
        )
        asyncio.run(_run_fleet(backend, scaling, spec, engine, host, process))
    return 0


async def _run_fleet(
    backend: FleetBackend,
    scaling: ScalingOptions,
    spec: AgentSpec,
    engine: EngineConfig,
    host: HostOptions,
    process: dict[str, Any],
) -> None:
    keys, url, shards = Keys(process["namespace"]), host.redis_url or "", shards_text(host.shards or "")
    await check_servers(url, shards, namespace=process["namespace"], for_worker=True)
    connection = make_commands(url, shards, keys, retry_for_s=RETRY_FOR_S)
    details = {"model": engine.model_name, "engines": f"{scaling.least}:{scaling.most}", "ground": backend.name}
    presence = Presence(connection, keys, ProcessKind.FLEET, details)
    fleet = Fleet(
        backend,
        Demand(connection, keys, engine.model_name, engine.max_num_seqs),
        scaling,
        spec,
        drain_timeout_s=process["drain_timeout_s"],
        on_ready=_announcer(engine, scaling, backend),
    )
    try:
        presence.start()
        await fleet.run()
    finally:
        tell_stopping()
        await presence.leave()
        await connection.close()


def _announcer(engine: EngineConfig, scaling: ScalingOptions, backend: FleetBackend) -> Callable[[], None]:
    def announce() -> None:
        line = f"ready: model {engine.model_name} on {scaling.least} to {scaling.most} engines, {backend.name}"
        print(line, flush=True)  # noqa: T201  # as `worker start` says it
        tell_ready(line)

    return announce


def _check_options(settings: Settings, options: FleetOptions) -> tuple[HostOptions, ScalingOptions]:
    """Check the options that do not depend on the cluster. Returns the host's options and the scaling options."""
    host, engine = settings.make(HostOptions), settings.fields_of(EngineConfig)
    with settings.naming_sources():
        if (options.ray or "").startswith("ray://"):
            raise UsageError(
                f"--ray {options.ray}: Ray's client cannot run a fleet; run this on a host of the cluster, "
                "with --ray auto"
            )
        if host.engines is None:
            raise UsageError(
                "--ray requires --engines MIN:MAX, as 1:8; with a minimum of 0 the first request starts an engine"
            )
        if host.gpus is not None:
            raise UsageError("--gpus: with --ray the GPUs of an engine are those that Ray gives it; leave it out")
        for name in ("data_parallel_size", "data_parallel_group"):
            if (value := engine[name]) not in (1, ""):
                raise UsageError(
                    f"--{name.replace('_', '-')} {value}: engines of a fleet come and go one by one, and those of a "
                    "group together; start groups on their hosts, without --ray"
                )
        for setting in settings.all:
            if setting.declared.name in _OF_HOSTS and setting.source:
                raise UsageError(f"{setting.source}: with --ray the hosts of an engine find each other; leave it out")
        if engine["nnodes"] > 1 and options.placement_group is not None:
            raise UsageError(
                f"--ray-placement-group {options.placement_group}: an engine over {engine['nnodes']} hosts needs a "
                "group of its own; leave it out"
            )
        if host.metrics_port:
            raise UsageError(
                f"--metrics-port {host.metrics_port}: several engines of a fleet may be on one host; give 0, or have "
                "`penstock metrics` tell of all"
            )
        if not host.redis_url:
            raise UsageError("--ray needs --redis-url, a Redis that all hosts of the cluster reach")
        parse_pool(host.redis_url)
        least, most = bounds(host.engines)
        scaling = ScalingOptions(
            least=least, most=most, wanted_wait_s=options.wanted_wait_s, shrink_after_s=options.shrink_after_s
        )
    return host, scaling


def resources_of(settings: Settings, device: str) -> dict[str, float]:
    """Return Ray's resources of one engine on each of its hosts: on the CPU its threads, else its GPUs and one CPU."""
    values = {setting.declared.name: setting.value for setting in settings.all}
    num_ranks = 1
    for name in _RANKS:
        num_ranks *= values[name]
    num_ranks //= values["nnodes"]
    if device == "cpu":
        return {"CPU": float((values["threads"] or 1) * num_ranks)}
    # vLLM may get its ranks from its own options; then --gpus-per-engine has their number.
    return {"CPU": 1.0, "GPU": float(max(num_ranks, values["gpus_per_engine"]))}


def passed_on(settings: Settings, device: str, num_cpus: int) -> dict[str, str]:
    """Return the options of each agent's ``worker start``, by environment variable: all that are set here, as text."""
    variables = {
        setting.declared.variable: _words(setting)
        for setting in settings.all
        if setting.source
        and setting.declared.struct is not FleetOptions
        and setting.declared.name not in _NOT_PASSED_ON
    }
    options = {"PENSTOCK_DEVICE": device, **variables}
    threads = next((setting.value for setting in settings.all if setting.declared.name == "threads"), 0)
    if device == "cpu":
        # Ray counts CPUs but does not bind processes to them, so by default an engine would use the whole host.
        options["PENSTOCK_THREADS"] = str(threads or num_cpus)
    return options


def _words(setting: Setting) -> str:
    value = setting.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)
