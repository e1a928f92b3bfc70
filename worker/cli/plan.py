"""The plan of a `worker start`: its engines, their devices and data-parallel groups, and its loggers."""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ...shared.process.command_line import UsageError
from ...shared.shards import shards_text
from ...shared.values.names import check_name
from ..config.engine_config import EngineConfig
from ..config.ranks import MAX_ENGINES_ON_HOST, read_node_key
from ..config.worker_config import WorkerConfig
from ..models.checkpoint.folder import check_local_model
from ..options.settings import Settings
from ..other_engines.kinds import KINDS
from ..programs import HostOptions

if TYPE_CHECKING:
    from ..supervisor import Placement
    from ..supervisor.stat_loggers import AggregateStatLoggerFactory, StatLoggerFactory

_HERE = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """Plan that follows from the options, before any process is started.

    Args:
        name: name of the worker in metrics.
        worker_id: id of this run of the worker in Redis.
        engine: common configuration of all engines.
        engines: configuration of each engine, in order.
        placements: devices of each engine.
        factories: factories of loggers of statistics.
    """

    name: str
    worker_id: str
    host: HostOptions
    engine: EngineConfig
    engines: Sequence[EngineConfig]
    placements: Sequence[Placement]
    factories: Sequence[StatLoggerFactory | AggregateStatLoggerFactory]

    @property
    def num_places(self) -> int:
        """Largest number of engines: one per placement on GPUs, ``MAX_ENGINES_ON_HOST`` on the CPU, one on hosts."""
        if self.engine.nnodes > 1:
            return 1
        return len(self.placements) if self.placements[0].visible_devices is not None else MAX_ENGINES_ON_HOST

    @property
    def ready_line(self) -> str:
        """Line to print once all engines serve."""
        where = ", ".join(dict.fromkeys(map(str, self.placements)))
        count = f"{len(self.placements)} engine{'s' if len(self.placements) > 1 else ''}"
        return f"ready: model {self.engine.model_name} on {count}, {where}{describe_choices(self.engine)}"

    def worker_config(self, index: int, *, redis_url: str, fork_server: str, process: dict[str, Any]) -> WorkerConfig:
        """Return the configuration of the worker process of engine ``index``, which may be added later.

        Args:
            process: fields of ``WorkerConfig`` that are options.
        """
        placement = self.placements[index] if index < len(self.placements) else self.placements[0]
        # An engine that is added later gets its share of the processors; running engines keep theirs.
        num_engines = max(index + 1, len(self.placements))
        engine = self.engines[min(index, len(self.engines) - 1)]
        return WorkerConfig(
            worker_id=self.worker_id,
            engine_id=f"{self.worker_id}-{index}",
            engine_name=f"{self.name}-{index}",
            redis_url=redis_url,
            shards=shards_text(self.host.shards or ""),
            engine=msgspec.structs.replace(engine, num_engines_on_host=num_engines),
            visible_devices=placement.visible_devices,
            supervisor_pid=os.getpid(),
            fork_server=fork_server,
            **process,
        )


def make_plan(settings: Settings) -> Plan:
    """Derive the plan from the options.

    Raises:
        ConfigurationError, UsageError: options contradict each other or the machine; names them and their sources.
        ModelLoadError: the model's path does not exist, or its folder lacks a file.
    """
    # Imported late, because it needs psutil, and `worker --help` must work without it.
    from ..supervisor import place_engines
    from ..supervisor.stat_loggers import load_factories

    host, fields = settings.make(HostOptions), settings.fields_of(EngineConfig)
    with settings.naming_sources():
        device = fields["device"] or KINDS[fields["engine"]].device
        placements = place_engines(host.gpus, device, num_engines_of(host), *gpus_per_engine(host, fields))
        on_host = {"device": placements[0].device, "num_engines_on_host": len(placements)}
        engine = EngineConfig(**{**fields, **on_host})
        check_name("the model's name (--served-model-name)", engine.model_name)
        check_gpus_per_engine(host, engine)
        _check_hosts(engine, len(placements))
        check_local_model(engine.model, needs_weights=engine.needs_weights)
        KINDS[engine.engine].check(engine)
        factories = load_factories(host.stat_loggers)
        name = host.worker_name or socket.gethostname()
        engines = group_engines(engine, len(placements), name)
    # With a random part, because in containers name and process id repeat, and claims of the previous worker must not
    # look like claims of this one.
    worker_id = f"{name}-{os.getpid()}-{secrets.token_hex(2)}"
    return Plan(name, worker_id, host, engine, engines, placements, factories)


def _check_hosts(engine: EngineConfig, num_engines: int) -> None:
    """Raise ``UsageError`` or ``ConfigurationError`` if an engine over several hosts cannot start here."""
    if engine.nnodes == 1:
        return
    read_node_key()
    if num_engines > 1:
        raise UsageError(
            f"--nnodes {engine.nnodes}: one engine spans the hosts, and {num_engines} engines would start here; give "
            "--engines 1, or select the GPUs of one with --gpus"
        )


def gpus_per_engine(host: HostOptions, fields: dict[str, Any]) -> tuple[int, str]:
    """Return the number of GPUs of an engine, and the options that define it."""
    sizes = {name: fields[name] for name in ("tensor_parallel_size", "pipeline_parallel_size") if fields[name] > 1}
    num_ranks = math.prod(sizes.values()) // fields["nnodes"]
    source = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes.items())
    if num_ranks == 1:
        return host.gpus_per_engine, f"--gpus-per-engine {host.gpus_per_engine}"
    if host.gpus_per_engine not in (1, num_ranks):
        raise UsageError(
            f"--gpus-per-engine {host.gpus_per_engine} contradicts {source}, which needs {num_ranks}; leave it out"
        )
    return num_ranks, source


def check_gpus_per_engine(host: HostOptions, engine: EngineConfig) -> None:
    """Refuse more GPUs than ranks, except for vLLM, whose own options may define more ranks."""
    if host.gpus_per_engine <= engine.num_ranks or engine.engine == "vllm":
        return
    count = host.gpus_per_engine
    instead = f"give --tensor-parallel-size {count}" if KINDS[engine.engine].has_ranks else "leave it out"
    raise UsageError(f"--gpus-per-engine {count}: an engine of {engine.engine} has a GPU for each rank; {instead}")


def describe_choices(engine: EngineConfig) -> str:
    """Describe options that change speed or rounding and are not at their default, for the ready line."""
    options = {
        "engine": engine.engine if engine.engine != "penstock" else None,
        "attention": engine.attention_backend if engine.attention_backend != "auto" else None,
        "KV cache in": engine.eight_bit_cache,
        "weights in": engine.quantization,
    }
    return "".join(f", {name} {value}" for name, value in options.items() if value is not None)


def num_engines_of(host: HostOptions) -> int | None:
    """Return the number of engines; None for one per GPU. Raises ``UsageError`` if ``--engines`` is a fleet's range."""
    if isinstance(host.engines, str):
        raise UsageError(f"--engines {host.engines} is for a fleet; give --ray as well, or one number")
    return host.engines


def group_engines(engine: EngineConfig, num_engines: int, worker_name: str) -> list[EngineConfig]:
    """Return the configuration of each engine of the host, in order. Without a named group they form groups here.

    Raises:
        UsageError: the engines cannot be divided into groups.
    """
    size = engine.data_parallel_size
    if not engine.is_grouped or engine.data_parallel_group:
        return [engine] * num_engines
    if num_engines % size:
        raise UsageError(
            f"--data-parallel-size {size} does not divide the {num_engines} engines of this host; give another number "
            "(--engines on the CPU), or name a group of several hosts (--data-parallel-group)"
        )
    return [
        msgspec.structs.replace(
            engine, data_parallel_group=f"{worker_name}-{index // size}", data_parallel_address=_HERE
        )
        for index in range(num_engines)
    ]
