"""A scenario to simulate, as in a TOML file. ``ops/guide/understanding/simulator.md`` has a table of the fields."""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from ...shared.errors import ConfigurationError, ValidationError
from ...shared.partitions import MAX_PARTITIONS
from ...shared.queue.policy import QueuePolicy, TenantPolicy
from ...shared.swap.views import SwapOptions
from ...shared.values.names import did_you_mean, partition_name
from ...shared.values.shown import shown
from .shapes import Arrivals, Constant, Fixed, Lengths, check_at_least, divided
from .speed import Speed, StepWork

# Up to this size Redis keeps the insertion order of a hash, on which the order of returned requests depends.
MAX_SEQS = 512
# Default model of engines and tenants.
MODEL = "simulated"


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the tables of a scenario."""


class SwapRule(enum.StrEnum):
    """Rule by which models share an engine: Penstock's, or one to compare it with (``swap_rules.py``)."""

    STANDING = "standing"
    FIRST_COME = "first-come"
    LLAMA_SWAP = "llama-swap"


class Swaps(_Table, frozen=True, kw_only=True):
    """Swaps of the models of an engine, and their costs in seconds. ``options`` are those of ``standing``."""

    rule: SwapRule = SwapRule.STANDING
    sleep_s: float = 0.5
    wake_s: float = 1.5
    options: SwapOptions = SwapOptions()

    def __post_init__(self) -> None:
        check_at_least("sleep_s", self.sleep_s, 0)
        check_at_least("wake_s", self.wake_s, 0.001)
        if self.options.idle_sleep_s or self.options.idle_unload_s:
            raise ValidationError("idle_sleep_s and idle_unload_s are not simulated; leave them out")


class Engines(_Table, frozen=True, kw_only=True):
    """Engines of one kind.

    Args:
        number: number of engines at the start.
        model: model that they serve.
        models: models that share each of them instead, one at a time; ``swaps`` are their swaps.
        speed: duration of their steps.
        slowdown: factors on the duration of a step while one engine computes, two, and so on; the last is for more. For
            engines that share a machine; empty if each has its own.
        max_num_seqs: maximum concurrent requests.
        kv_tokens: tokens of the KV cache.
        max_step_tokens: maximum tokens of a step; a longer prompt takes several.
        append_every_s: interval of appends to the log. Tokens not appended are lost with the engine.
    """

    number: int
    model: str = MODEL
    models: list[str] = []
    swaps: Swaps = Swaps()
    speed: Speed = Speed()
    max_num_seqs: int = 64
    kv_tokens: int = 200_000
    max_step_tokens: int = 2048
    append_every_s: float = 0.5
    slowdown: list[float] = []

    def __post_init__(self) -> None:
        check_at_least("number", self.number, 0)
        if len(set(self.models)) < len(self.models):
            raise ValidationError(f"models of an engine must differ, got {', '.join(self.models)}")
        for factor in self.slowdown:
            check_at_least("slowdown", factor, 0.001)
        check_at_least("kv_tokens", self.kv_tokens, 1)
        check_at_least("append_every_s", self.append_every_s, 0.001)
        if not 1 <= self.max_num_seqs <= MAX_SEQS:
            raise ValidationError(f"max_num_seqs must be from 1 to {MAX_SEQS}, got {shown(self.max_num_seqs)}")
        if self.max_step_tokens <= self.max_num_seqs:
            raise ValidationError(f"max_step_tokens must be above max_num_seqs, got {shown(self.max_step_tokens)}")

    @property
    def all_models(self) -> list[str]:
        """Return the models that one of them serves."""
        return self.models or [self.model]

    def step_s(self, work: StepWork, num_computing: int) -> float:
        """Return the duration of a step while ``num_computing`` engines compute, including this one."""
        factor = self.slowdown[min(num_computing, len(self.slowdown)) - 1] if self.slowdown else 1.0
        return factor * self.speed.step_s(work)


class Tenants(_Table, frozen=True, kw_only=True):
    """A group of ``number`` equal tenants. Each request belongs to a random one of them.

    Args:
        name: name of the group; a tenant is called ``NAME-i``, or ``NAME`` if it is the only one.
        model: model of their requests.
        models: several models instead, to each of which an equal part of the arrivals goes.
        band: band of their requests; empty for the queue's default.
        policy: weight and quotas of each tenant.
        arrivals: arrivals of the whole group.
        at_start: requests that wait when the simulation starts.
        prompt, output: lengths in tokens.
        max_tokens: max_tokens of their requests; 0 for the longest output.
        knows_length: whether max_tokens is exactly the length of the output instead.
        turns: turns of a session, each with all earlier turns in its prompt; ``arrivals`` are those of sessions.
        think_s: mean time from the end of a turn to the next.
        tells_session: whether clients name the session of a request, so that it goes to the engine that has it cached.
    """

    name: str
    number: int = 1
    model: str = MODEL
    models: list[str] = []
    band: str = ""
    policy: TenantPolicy = TenantPolicy()
    arrivals: Arrivals = Constant(per_s=0.0)
    at_start: int = 0
    prompt: Lengths = Fixed(tokens=200)
    output: Lengths = Fixed(tokens=100)
    max_tokens: int = 0
    knows_length: bool = False
    turns: int = 1
    think_s: float = 5.0
    tells_session: bool = True

    def __post_init__(self) -> None:
        check_at_least("number", self.number, 1)
        check_at_least("at_start", self.at_start, 0)
        check_at_least("max_tokens", self.max_tokens, 0)
        check_at_least("turns", self.turns, 1)
        check_at_least("think_s", self.think_s, 0)

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or max(1, self.output.most)

    @property
    def has_quota(self) -> bool:
        of = self.policy
        return any((of.requests_per_minute, of.tokens_per_minute, of.max_concurrent_requests))

    @property
    def all_models(self) -> list[str]:
        return self.models or [self.model]

    def part(self, model: str) -> Tenants:
        """Return the part of a group for one model."""
        if not self.models:
            return self
        return msgspec.structs.replace(self, model=model, arrivals=divided(self.arrivals, len(self.models)))

    def tenant(self, index: int) -> str:
        """Return the name of the tenant with an index."""
        return self.name if self.number == 1 else f"{self.name}-{index}"


class DeathKind(enum.StrEnum):
    """Kind of a death: with its host, which a reaper detects, or alone, which its supervisor detects immediately."""

    HOST = "host"
    PROCESS = "process"


class Deaths(_Table, frozen=True, kw_only=True):
    """Deaths of random engines at ``at_s``: a ``share`` of the living ones, or ``number``.

    With ``back_after_s`` as many engines start again that much later. Of engines of several models those die first that
    wake a model, then those with one awake, then those that wake models fastest.
    """

    at_s: float
    share: float = 0.0
    number: int = 0
    kind: DeathKind = DeathKind.HOST
    back_after_s: float | None = None

    def __post_init__(self) -> None:
        check_at_least("at_s", self.at_s, 0)
        if not 0 <= self.share <= 1:
            raise ValidationError(f"share must be in [0, 1], got {shown(self.share)}")
        if (self.share > 0) == (self.number > 0):
            raise ValidationError("deaths need one of share and number")


class Autoscaling(_Table, frozen=True, kw_only=True):
    """Number of engines of the first kind that follows the load.

    Args:
        least, most: minimum and maximum number of engines.
        wanted_wait_s: time within which waiting requests should be served.
        look_every_s: interval of decisions.
        start_s: time until a new engine serves.
        down_after_s: time for which fewer engines must have sufficed before one is removed.
    """

    least: int
    most: int
    wanted_wait_s: float
    look_every_s: float = 5.0
    start_s: float = 30.0
    down_after_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValidationError(f"least must be from 1 to most, got {shown(self.least)}")
        for name in ("wanted_wait_s", "look_every_s"):
            check_at_least(name, getattr(self, name), 0.001)


class Shard(_Table, frozen=True, kw_only=True):
    """A separate Redis with the queues of some models, which may fail and return with its data.

    Args:
        models: models whose queues it holds; partitions are ``MODEL``, ``MODEL#1``, ``MODEL#2`` and so on.
        away_at_s: time when its primary dies; None for never.
        away_for_s: time until its replica has taken over.
    """

    models: list[str]
    away_at_s: float | None = None
    away_for_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.models:
            raise ValidationError("models of a shard must not be empty")
        check_at_least("away_at_s", self.away_at_s or 0, 0)
        check_at_least("away_for_s", self.away_for_s, 0.001)


class Partitions(_Table, frozen=True, kw_only=True):
    """Partitions of a model's queue. Each tenant uses one of ``number``; tenants in ``spread`` use all."""

    number: int
    model: str = MODEL
    spread: list[str] = []

    def __post_init__(self) -> None:
        if not 1 <= self.number <= MAX_PARTITIONS:
            raise ValidationError(f"number must be from 1 to {MAX_PARTITIONS}, got {shown(self.number)}")


class Checks(_Table, frozen=True, kw_only=True):
    """Checks: no request without a quota waits longer than this while one engine has capacity all the time."""

    max_wait_with_room_s: float = 2.0


class Scenario(_Table, frozen=True, kw_only=True):
    """A whole scenario. ``round_trip_ms`` is the time from a wake, or the end of a request, to the next claim.

    Deaths by ``share`` apply to the engines of each model, autoscaling to the model of the first engines.
    """

    duration_s: float
    engines: list[Engines]
    tenants: list[Tenants]
    seed: int = 0
    round_trip_ms: float = 1.0
    queue: QueuePolicy = QueuePolicy()
    deaths: list[Deaths] = []
    autoscaling: Autoscaling | None = None
    shards: list[Shard] = []
    partitions: list[Partitions] = []
    checks: Checks = Checks()

    def __post_init__(self) -> None:
        check_at_least("duration_s", self.duration_s, 0.001)
        check_at_least("round_trip_ms", self.round_trip_ms, 0.001)
        if not self.engines:
            raise ValidationError("a scenario needs a table [[engines]]")
        names = [group.name for group in self.tenants]
        if len(set(names)) < len(names):
            raise ValidationError(f"the names of tenants must differ, got {', '.join(names)}")
        self._check_models()
        for group in self.tenants:
            if group.band and group.band not in self.queue.bands:
                raise ValidationError(f"band must be one of {', '.join(self.queue.bands)}, got {shown(group.band)}")

    def _check_models(self) -> None:
        for group in self.tenants:
            for model in set(group.all_models) - set(self.models):
                raise ValidationError(
                    f"model must be one that engines serve ({', '.join(self.models)}), got {shown(model)}"
                )
        is_shared = any(kind.models for kind in self.engines)
        if is_shared:
            self._check_shared_engines()
        sharded = [model for shard in self.shards for model in shard.models]
        if len(set(sharded)) < len(sharded):
            raise ValidationError(f"each model is on one shard, got {', '.join(sharded)}")
        split = [one.model for one in self.partitions]
        if len(set(split)) < len(split) or set(split) - set(self.models):
            raise ValidationError(f"partitions are of a model that engines serve, once, got {', '.join(split)}")
        if unknown := set(sharded) - {name for model in self.models for name in self.queues_of(model)}:
            raise ValidationError(f"models of a shard must be served by engines, got {shown(min(unknown))}")
        if len(self.models) > 1 and not is_shared and any(deaths.number for deaths in self.deaths):
            raise ValidationError("deaths need a share, not a number, where there are several models")

    def _check_shared_engines(self) -> None:
        for name in ("autoscaling", "partitions"):
            if getattr(self, name):
                raise ValidationError(f"{name} cannot be combined with engines of several models")
        if any(shard.away_at_s is not None for shard in self.shards):
            raise ValidationError("away_at_s of a shard cannot be combined with engines of several models")
        if any(deaths.kind is not DeathKind.HOST for deaths in self.deaths):
            raise ValidationError('deaths of engines of several models need kind = "host"')
        if self.deaths and not all(kind.models for kind in self.engines):
            raise ValidationError("deaths need engines that all have several models, or none")

    @property
    def models(self) -> list[str]:
        """Return the models that engines serve, in order."""
        return list(dict.fromkeys(model for kind in self.engines for model in kind.all_models))

    def partitions_of(self, model: str) -> Partitions:
        """Return the partitions of a model."""
        return next((one for one in self.partitions if one.model == model), Partitions(number=1, model=model))

    def queues_of(self, model: str) -> list[str]:
        """Return the names of a model's partitions."""
        return [partition_name(model, number) for number in range(self.partitions_of(model).number)]

    def part(self, model: str) -> Scenario:
        """Return the part of the scenario for one model."""
        return msgspec.structs.replace(
            self,
            engines=[msgspec.structs.replace(kind, model=model) for kind in self.engines if model in kind.all_models],
            tenants=[group.part(model) for group in self.tenants if model in group.all_models],
            autoscaling=self.autoscaling if model == self.engines[0].model else None,
            partitions=[one for one in self.partitions if one.model == model],
            shards=[
                msgspec.structs.replace(shard, models=own)
                for shard in self.shards
                if (own := [name for name in shard.models if name in self.queues_of(model)])
            ],
        )


def read_scenario(text: str) -> Scenario:
    """Parse a scenario from TOML.

    Raises:
        ConfigurationError: the text is not TOML, or a key or value is invalid; the message lists valid ones.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"the scenario is no TOML: {error}") from error
    _check_keys(inspect.type_info(Scenario), tables, "")
    try:
        scenario = msgspec.convert(tables, Scenario)
        if not scenario.tenants:
            raise ValidationError("a scenario needs a table [[tenants]]")
        return scenario
    except (msgspec.ValidationError, ValidationError) as error:
        raise ConfigurationError(f"the scenario: {error}") from error


def read_scenarios(paths: Iterable[Path], seed: int | None) -> Iterator[tuple[Path, Scenario]]:
    """Yield the scenarios of files with their paths. ``seed`` replaces the seed of each, if it is not None.

    Raises:
        ConfigurationError: a scenario is wrong, or cannot be read.
    """
    for path in paths:
        try:
            scenario = read_scenario(path.read_text())
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
        yield path, scenario if seed is None else msgspec.structs.replace(scenario, seed=seed)


def _check_keys(kind: inspect.Type, value: Any, where: str) -> None:
    """Raise if a key is no field. This is checked before msgspec, whose errors suggest no similar key."""
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            _check_keys(kind.item_type, item, f"{where}[{index}]")
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            if isinstance(one, inspect.StructType) and _is_meant(one, value):
                _check_keys(one, value, where)
    elif isinstance(kind, inspect.StructType) and isinstance(value, Mapping):
        fields = {field.encode_name: field.type for field in kind.fields}
        for key, item in value.items():
            if key not in fields and key != kind.tag_field:
                hint = did_you_mean(key, fields) or f"there are {', '.join(fields)}"
                raise ConfigurationError(f"the scenario has no key {f'{where}.{key}'.lstrip('.')}; {hint}")
            if key in fields:
                _check_keys(fields[key], item, f"{where}.{key}".lstrip("."))


def _is_meant(kind: inspect.StructType, value: Any) -> bool:
    return isinstance(value, Mapping) and (kind.tag is None or value.get(kind.tag_field) == kind.tag)
