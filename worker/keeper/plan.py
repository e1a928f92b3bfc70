"""The plan of a worker with several models: names, engines, devices and memory, before any process is started."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ...shared.deployment.records import ModelCard
from ...shared.errors import ConfigurationError, ModelLoadError
from ...shared.process.command_line import UsageError
from ...shared.shards import shards_text
from ...shared.swap.views import SleepLevel, SwapOptions
from ...shared.values.names import check_name
from ...shared.values.shown import format_bytes
from ..config.engine_config import EngineConfig
from ..config.fleet import FleetOptions
from ..config.swap import SharingOptions
from ..config.worker_config import WorkerConfig
from ..models.checkpoint.folder import check_local_model
from ..options.settings import Settings
from ..other_engines.kinds import KINDS
from ..programs import HostOptions
from ..supervisor import Placement, place_engines
from .cards import CardReply, read_cards
from .memory import (
    PROCESS_BYTES,
    ModelBytes,
    cache_bytes,
    default_budget,
    default_host_budget,
    size_problem,
)
from .sources import ModelEntry, SharedSettings

log = structlog.get_logger()
# Options that give an engine several ranks or a group, which several models beside each other do not support yet.
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True)
class PlannedModel:
    """A model of the plan.

    Args:
        engine: configuration of its engine; the size of the KV cache is added at each start of a process.
        process: fields of ``WorkerConfig`` that are options.
        path: its local folder or file; None for a name on the hub.
        swap_options: options of the device, with those of the model.
        bytes: its memory, as far as files and options say it.
        problem: why it cannot be served, until its files change; empty if it can.
        is_too_large: whether that is because it does not fit.
    """

    engine: EngineConfig
    process: dict[str, Any]
    path: Path | None
    bytes: ModelBytes
    sleep_level: SleepLevel | None = None
    swap_options: SwapOptions = field(default_factory=SwapOptions)
    problem: str = ""
    is_too_large: bool = False

    @property
    def name(self) -> str:
        return self.engine.model_name


@dataclass(frozen=True)
class DevicePlan:
    """A device of the plan, with the bytes that all its models may take together."""

    placement: Placement
    budget: int
    host_budget: int


@dataclass(frozen=True)
class SharedPlan:
    """Plan that follows from the options. Each device has all models.

    Args:
        cards: card of each model according to its files.
    """

    name: str
    worker_id: str
    host: HostOptions
    sharing: SharingOptions
    models: Sequence[PlannedModel]
    devices: Sequence[DevicePlan]
    cards: Mapping[str, ModelCard]

    def ready_line(self, awake: Sequence[str]) -> str:
        """Return the line to print once the worker serves."""
        where = ", ".join(dict.fromkeys(str(device.placement) for device in self.devices))
        names = ", ".join(model.name for model in self.models if not model.problem)
        return f"ready: models {names} on {where}; awake: {', '.join(awake) or 'none'}"

    def worker_configs(self, redis_url: str, fork_server: str) -> list[list[WorkerConfig]]:
        """Return the configuration of each model's worker process, by device."""
        return [
            [
                WorkerConfig(
                    worker_id=self.worker_id,
                    engine_id=f"{self.worker_id}-{place * len(self.models) + index}",
                    engine_name=f"{self.name}-{place * len(self.models) + index}",
                    redis_url=redis_url,
                    shards=shards_text(self.host.shards or ""),
                    engine=model.engine,
                    visible_devices=device.placement.visible_devices,
                    supervisor_pid=os.getpid(),
                    fork_server=fork_server,
                    is_shared=True,
                    **model.process,
                )
                for index, model in enumerate(self.models)
            ]
            for place, device in enumerate(self.devices)
        ]


def make_shared_plan(shared: SharedSettings) -> SharedPlan:
    """Derive the plan from the options, and log a line for each model.

    Raises:
        ConfigurationError, UsageError: options contradict each other or the machine; names them and their sources.
        ModelLoadError: no model can be served; the message has the reason of each.
    """
    settings = shared.settings
    host, sharing = settings.make(HostOptions), settings.make(SharingOptions)
    _check_alone(settings, host)
    with settings.naming_sources():
        device = settings.fields_of(EngineConfig)["device"]
        placements = place_engines(host.gpus, device, None)
        models = [_plan_model(entry, placements) for entry in shared.models]
        sharing.swap_options  # noqa: B018  # checks their values
    _check_names(models)
    devices = [_plan_device(placement, sharing, len(placements)) for placement in placements]
    models, cards = _with_cards(models)
    _check_pinned(models, devices)
    models = [_fitted(model, models, devices) for model in models]
    _log_models(models, devices)
    if all(model.problem for model in models):
        raise ModelLoadError("; ".join(f"{model.name}: {model.problem}" for model in models))
    name = host.worker_name or socket.gethostname()
    # As for a worker of one model: the random part keeps claims of two workers apart.
    worker_id = f"{name}-{os.getpid()}-{secrets.token_hex(2)}"
    return SharedPlan(name, worker_id, host, sharing, models, devices, cards)


def _check_alone(settings: Settings, host: HostOptions) -> None:
    """Refuse options that several models on a device do not support yet."""
    if settings.make(FleetOptions).ray is not None:
        raise UsageError("--ray is for one model; start a fleet for each, or leave --ray out")
    if host.engines not in (None, 1):
        raise UsageError(
            f"--engines {host.engines} is for one model; several models have one engine each, so leave it out"
        )
    if host.gpus_per_engine > 1:
        raise UsageError(f"--gpus-per-engine {host.gpus_per_engine} is for one model; leave it out")


def _check_process(process: dict[str, Any]) -> dict[str, Any]:
    if process["standby"]:
        raise UsageError("--standby is for one model; leave it out")
    return process


def _plan_model(entry: ModelEntry, placements: Sequence[Placement]) -> PlannedModel:
    fields = entry.settings.fields_of(EngineConfig)
    engine = EngineConfig(**{**fields, "device": placements[0].device, "num_engines_on_host": len(placements)})
    name = check_name("the model's name (served_model_name)", engine.model_name)
    for option in _RANKS:
        if getattr(engine, option) > 1:
            raise ConfigurationError(
                f"{option} {getattr(engine, option)} of {name}: a model beside others has one rank; serve it alone, or "
                "leave the option out"
            )
    if engine.data_parallel_group:
        raise ConfigurationError(f"data_parallel_group of {name}: a model beside others has no group; leave it out")
    if engine.engine == "http":
        raise ConfigurationError(f"engine http of {name} cannot sleep; serve it in a worker of its own")
    KINDS[engine.engine].check(engine)
    problem, path = "", None
    try:
        path = check_local_model(engine.model, needs_weights=engine.needs_weights)
    except (ModelLoadError, OSError) as error:
        problem = str(error)
    return PlannedModel(
        engine=engine,
        process=_check_process(entry.settings.fields_of(WorkerConfig)),
        path=path if path is not None else _local_path(engine.model, problem),
        bytes=ModelBytes(
            weights=0,
            process=PROCESS_BYTES[engine.device],
            cache=engine.kv_cache_memory,
            is_pinned=entry.is_pinned,
        ),
        sleep_level=entry.sleep_level,
        swap_options=entry.settings.make(SharingOptions).swap_options,
        problem=problem,
    )


def _local_path(model: str, problem: str) -> Path | None:
    """Return the path of a model whose files are damaged or missing, which may be repaired."""
    return Path(os.path.expanduser(model)) if problem else None


def _with_cards(models: Sequence[PlannedModel]) -> tuple[list[PlannedModel], dict[str, ModelCard]]:
    """Return the models with the problems and sizes that their files have, and a card for each."""
    replies = read_cards([model.engine for model in models])
    cards = {reply.card.model: reply.card for reply in replies}
    pairs = zip(models, replies, strict=True)
    return [_with_reply(model, reply) for model, reply in pairs], cards


def _with_reply(model: PlannedModel, reply: CardReply) -> PlannedModel:
    weights = msgspec.structs.replace(model.bytes, weights=reply.weight_bytes)
    return replace(model, problem=model.problem or reply.problem, bytes=weights)


def _check_names(models: Sequence[PlannedModel]) -> None:
    for name, count in Counter(model.name for model in models).items():
        if count > 1:
            paths = " and ".join(model.engine.model for model in models if model.name == name)
            raise ConfigurationError(
                f"{count} models are called {name}: {paths}; give them names with served_model_name in a --models file"
            )


def _plan_device(placement: Placement, sharing: SharingOptions, num_devices: int) -> DevicePlan:
    visible, budget, host_budget = placement.visible_devices, sharing.device_memory, sharing.host_memory
    return DevicePlan(
        placement,
        default_budget(visible) if budget is None else budget,
        default_host_budget(visible, num_devices) if host_budget is None else host_budget // num_devices,
    )


def _check_pinned(models: Sequence[PlannedModel], devices: Sequence[DevicePlan]) -> None:
    budget = min(device.budget for device in devices)
    pinned = [model for model in models if model.bytes.is_pinned]
    needs = {model.name: model.bytes.weights + (model.bytes.cache or 0) + model.bytes.process for model in pinned}
    if sum(needs.values()) > budget:
        words = " and ".join(f"{name} ({format_bytes(size)})" for name, size in needs.items())
        raise ConfigurationError(
            f"pinned models do not fit together: {words} need {format_bytes(sum(needs.values()))}, device_memory is "
            f"{format_bytes(budget)}; unpin one, or raise device_memory"
        )


def _fitted(model: PlannedModel, models: Sequence[PlannedModel], devices: Sequence[DevicePlan]) -> PlannedModel:
    """Return the model with the problem that it fits into no device, if that is so."""
    device = max(devices, key=lambda device: device.budget)
    problem = size_problem(device.budget, model.name, model.bytes, [each.bytes for each in models])
    if model.problem or not problem:
        return model
    return replace(model, problem=problem, is_too_large=True)


def _log_models(models: Sequence[PlannedModel], devices: Sequence[DevicePlan]) -> None:
    for device in devices:
        log.info(
            "device_shared",
            device=str(device.placement),
            budget_mib=device.budget >> 20,
            host_budget_mib=device.host_budget >> 20,
            num_models=len(models),
        )
    budget = min(device.budget for device in devices)
    everyone = [model.bytes for model in models]
    for model in models:
        log.log(
            logging.WARNING if model.problem else logging.INFO,
            "model_planned",
            model=model.name,
            weights_mib=math.ceil(model.bytes.weights / (1 << 20)),
            kv_cache_mib=0 if model.problem else cache_bytes(budget, model.bytes, everyone) >> 20,
            sleep_level="auto" if model.sleep_level is None else int(model.sleep_level),
            is_pinned=model.bytes.is_pinned,
            problem=model.problem,
        )
