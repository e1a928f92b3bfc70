"""``penstock queue configure`` and ``penstock queue tenant``: show and change policies."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ....shared.process.command_line import Command, add_redis_arguments
from ....shared.queue.policy import Order, OverQuota, QueuePolicy, TenantPolicy
from ....shared.values.names import check_name
from ....shared.values.shown import format_number
from ...words import format_duration, format_sheet
from ..command_parts import OpenModel, on_model

_OF_TENANTS = "tenant-"


@dataclass(frozen=True)
class _Option:
    """A command-line option that sets one field of a policy; without it the field is unchanged."""

    flag: str
    field: str
    metavar: str
    read: Callable[[str], Any]
    help: str


def describe_policy(policy: QueuePolicy) -> str:
    """Return a policy as lines of a name and a value."""
    bands = (f"{band} (default)" if band == policy.default_band else band for band in policy.bands)
    depth, tokens = policy.max_queue_depth, policy.max_queue_tokens
    ageing = "none: a low band may starve"
    if policy.ageing_s is not None:
        ageing = f"{format_duration(policy.ageing_s)} of waiting for each band up"
    lines = {
        "bands": ", ".join(bands),
        "ageing": ageing,
        "strictness": f"{format_number(policy.strictness)} of the tokens stay with a band while work below it has aged",
        "order": str(policy.order),
        "sessions": _sessions(policy),
        "events": f"about {policy.events_kept:,} are kept" if policy.events_kept else "none are written",
        "limits": f"{_or_any(depth)} requests and {_or_any(tokens)} tokens wait",
        "tenants": f"{describe_tenant_policy(policy.tenant)}, unless a tenant has a policy of its own",
    }
    return format_sheet(lines)


def _sessions(policy: QueuePolicy) -> str:
    if policy.warm_ttl_s is None:
        return "go to any engine"
    memory = f"for {format_duration(policy.warm_ttl_s)} it is known which engine had them"
    return f"{memory}, and others leave them to it for {policy.affinity_ms} ms" if policy.affinity_ms else memory


def describe_tenant_policy(policy: TenantPolicy) -> str:
    return f"weight {format_number(policy.weight)}, {describe_quotas(policy) or 'no quotas'}"


def describe_quotas(policy: TenantPolicy) -> str:
    """Return the limits that are set in one line; "" if there are none."""
    quotas = (
        (policy.requests_per_minute, "req/min"),
        (policy.tokens_per_minute, "tok/min"),
        (policy.max_concurrent_requests, "running"),
    )
    limits = ((policy.max_queue_depth, "waiting"), (policy.max_queue_tokens, "tokens waiting"))
    words = [f"{limit} {unit}" for limit, unit in quotas if limit is not None]
    if words and policy.over_quota is OverQuota.REFUSE:
        words[-1] += " or refused"
    return ", ".join([*words, *(f"{limit} {unit}" for limit, unit in limits if limit is not None)])


def _or_any(limit: int | None) -> str:
    return "any number of" if limit is None else f"at most {limit}"


def _limit(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, or none for no limit, got {text!r}")
    return int(text)


def _seconds(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, or none for never, got {text!r}") from None


def _milliseconds(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of milliseconds, got {text!r}")
    return int(text)


def _number_argument(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be 0 or a positive integer, got {text!r}")
    return int(text)


def _names_argument(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _member(kind: type[enum.StrEnum]) -> Callable[[str], enum.StrEnum]:
    def read(text: str) -> enum.StrEnum:
        if text not in tuple(kind):
            raise argparse.ArgumentTypeError(f"must be {' or '.join(kind)}, got {text!r}")
        return kind(text)

    return read


_DEPTHS = (
    _Option("max-queue-depth", "max_queue_depth", "N|none", _limit, "maximum waiting requests; more are refused"),
    _Option("max-queue-tokens", "max_queue_tokens", "N|none", _limit, "maximum waiting tokens, prompts and max_tokens"),
)
_QUEUE_OPTIONS = (
    _Option("bands", "bands", "A,B,C", _names_argument, "priority bands, most urgent first"),
    _Option("default-band", "default_band", "BAND", str, "band of requests that name none"),
    _Option("ageing", "ageing_s", "S|none", _seconds, "a request that has waited this long counts as in the next band"),
    _Option("strictness", "strictness", "X", float, "share of the tokens that a band keeps from aged work, up to 1"),
    _Option("order", "order", "fcfs|edf", _member(Order), "first come, first served, or earliest deadline first"),
    _Option("warm-ttl", "warm_ttl_s", "S|none", _seconds, "how long the engine of a conversation is remembered"),
    _Option(
        "affinity", "affinity_ms", "MS", _milliseconds, "how long other engines leave a conversation to that engine"
    ),
    _Option("events-kept", "events_kept", "N", _number_argument, "number of events of requests to store; 0 for none"),
    *_DEPTHS,
)
_TENANT_OPTIONS = (
    _Option("requests-per-minute", "requests_per_minute", "N|none", _limit, "maximum requests started per minute"),
    _Option("tokens-per-minute", "tokens_per_minute", "N|none", _limit, "maximum tokens per minute, input and output"),
    _Option("max-concurrent", "max_concurrent_requests", "N|none", _limit, "maximum concurrent requests"),
    _Option("over-quota", "over_quota", "wait|refuse", _member(OverQuota), "requests over quota wait or are refused"),
    *_DEPTHS,
)
_WEIGHT = _Option("weight", "weight", "W", float, "share of the tokens relative to other waiting tenants")


def _add_options(parser: argparse.ArgumentParser, options: Sequence[_Option], prefix: str = "") -> None:
    for option in options:
        parser.add_argument(
            f"--{prefix}{option.flag}",
            dest=prefix + option.field,
            metavar=option.metavar,
            type=option.read,
            default=argparse.SUPPRESS,
            help=f"{option.help}{', each tenant' if prefix else ''}",
        )


def _given(arguments: argparse.Namespace, options: Sequence[_Option], prefix: str = "") -> dict[str, Any]:
    values = vars(arguments)
    return {option.field: values[prefix + option.field] for option in options if prefix + option.field in values}


def _add_configure_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="also one that no worker has served yet")
    _add_options(parser, _QUEUE_OPTIONS)
    _add_options(parser, _TENANT_OPTIONS, _OF_TENANTS)
    parser.add_argument("--reset", action="store_true", help="begin with the default policy")
    add_redis_arguments(parser)


def _add_tenant_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="also one that no worker has served yet")
    parser.add_argument("tenant", metavar="TENANT")
    _add_options(parser, (_WEIGHT, *_TENANT_OPTIONS))
    parser.add_argument("--reset", action="store_true", help="begin with what the queue gives every tenant")
    add_redis_arguments(parser)


async def _configure(model: OpenModel, arguments: argparse.Namespace) -> None:
    queue = await model.queue()
    policy = QueuePolicy() if arguments.reset else await queue.policy()
    changes = _given(arguments, _QUEUE_OPTIONS)
    if of_tenants := _given(arguments, _TENANT_OPTIONS, _OF_TENANTS):
        changes["tenant"] = replace(policy.tenant, **of_tenants)
    if changes or arguments.reset:
        policy = replace(policy, **changes)
        await model.operations.configure(model.name, policy)
    _print_if_unserved(model)
    print(describe_policy(policy))


async def _tenant(model: OpenModel, arguments: argparse.Namespace) -> None:
    queue, tenant = await model.queue(), check_name("tenant", arguments.tenant)
    own = None if arguments.reset else (await queue.tenant_policies()).get(tenant)
    changes = _given(arguments, (_WEIGHT, *_TENANT_OPTIONS))
    policy = own or (await queue.policy()).tenant
    if changes or arguments.reset:
        policy = replace(policy, **changes)
        own = policy if changes else None
        await model.operations.configure_tenant(model.name, tenant, own)
    _print_if_unserved(model)
    print(f"{tenant}: {describe_tenant_policy(policy)} ({'the default' if own is None else 'its own'} policy)")


def _print_if_unserved(model: OpenModel) -> None:
    if not model.was_served:
        print(f"no worker has served {model.name!r} yet; this policy applies when one does")


CONFIGURE = Command(
    "configure",
    "Change the given settings of a queue's policy, or show it.",
    run=on_model(_configure, wait_for_model=True),
    add_arguments=_add_configure_arguments,
)
TENANT = Command(
    "tenant",
    "Change the given settings of one tenant's policy, or show it.",
    run=on_model(_tenant, wait_for_model=True),
    add_arguments=_add_tenant_arguments,
)
