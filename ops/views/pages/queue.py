"""Pages of one model's queue: bands, tenants, lanes and shares; pause, purge, weights, quotas and policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from ....producer.control.secret_keys import Role
from ....shared.errors import ValidationError
from ....shared.queue.policy import QueuePolicy, TenantPolicy
from ....shared.queue.stats import QueueStats, TenantStats
from ...words import readiness_words
from ..access import Access
from ..charts import CHART_QUERY, read_charts, rows_of
from ..page import Action, ActionContext, Page, PageSection, Params, View, field_of, number_field
from ..source import PageSnapshot, together
from ..words import number
from .usage import read_budgets

PAGE_ROWS = 100
# Up to this many tenants are sorted by queue depth. Beyond it, one page is read at a time, sorted by name.
MOST_SORTED = 500
CONFIGURED_CACHED_S = 10.0
# Before the fields of the policy that tenants without their own have, in the form of the queue's policy.
TENANT_PREFIX = "tenant."
P = TypeVar("P", QueuePolicy, TenantPolicy)
_QUERY = ("model", "q", "from", *CHART_QUERY)
_LABELS = {
    "bands": "Bands, the most urgent first",
    "default_band": "Default band",
    "strictness": "Strictness: share of its tokens that a band keeps while lower bands wait",
    "ageing_s": "Ageing: seconds of waiting that raise a request by one band",
    "order": "Order of a tenant's requests",
    "max_queue_depth": "Max waiting requests",
    "max_queue_tokens": "Max waiting tokens",
    "warm_ttl_s": "Seconds for which the engine of a conversation is remembered",
    "affinity_ms": "Milliseconds that a request is held for the engine with its conversation",
    "events_kept": "Events of requests to keep",
    "weight": "Weight",
    "requests_per_minute": "Requests per minute",
    "tokens_per_minute": "Tokens per minute",
    "max_concurrent_requests": "Max running requests",
    "over_quota": "Requests over quota",
}
_VALUES = {"fcfs": "first come, first served", "edf": "earliest deadline first", "refuse": "are refused"}
_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent_requests",
    "max_queue_depth",
    "max_queue_tokens",
)


async def _read_queue(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    model = await _model(snapshot, params)
    if not model:
        return {"model": "", "rows": [], "models": []}
    engines = [engine for engine in await snapshot.engines() if engine.model == model]
    queue = await snapshot.queue(model)
    policy, names, configured = await together(
        snapshot.once(("policy", model), queue.policy),
        _tenant_names(snapshot, model, params),
        _configured(snapshot, model),
    )
    first = max(0, int(params["from"])) if params.get("from", "").isdecimal() else 0
    is_sorted = len(names) <= MOST_SORTED
    tenants = names if is_sorted else names[first : first + PAGE_ROWS]
    stats: QueueStats = await snapshot.once(("tenants", model, tuple(tenants)), lambda: queue.stats(tenants=tenants))
    page_tenants = stats.tenants[first : first + PAGE_ROWS] if is_sorted else stats.tenants
    history = await read_charts(snapshot, [model], params)
    total_weight = sum(tenant.weight for tenant in stats.tenants if tenant.depth) if is_sorted else 0.0
    return {
        "model": model,
        "models": list(await snapshot.models()),
        "stats": stats,
        "tokens_per_s": sum(engine.tokens_per_s for engine in engines),
        "readiness": readiness_words(stats.readiness),
        "policy": policy,
        "history": history,
        "rows": [_tenant_row(tenant, total_weight, configured) for tenant in page_tenants],
        "num_tenants": len(names),
        "first": first,
        "next": first + PAGE_ROWS if first + PAGE_ROWS < len(names) else None,
        "is_sorted": is_sorted,
        "facts": {**_facts(stats), "series": rows_of(history)},
    }


async def _model(snapshot: PageSnapshot, params: Params) -> str:
    """Return the model named in the query, else the first model; "" if there is none."""
    if params.get("model"):
        return (await snapshot.check_model(params["model"])).model
    return next(iter(await snapshot.models()), "")


async def _configured(snapshot: PageSnapshot, model: str) -> frozenset[str]:
    """Return the tenants that have a policy of their own, also those that wait for nothing."""

    async def read_policies() -> frozenset[str]:
        return frozenset(await (await snapshot.queue(model)).tenant_policies())

    return await snapshot.source.cached(("configured", model), CONFIGURED_CACHED_S, read_policies)


async def _tenant_names(snapshot: PageSnapshot, model: str, params: Params) -> list[str]:
    active = await snapshot.once(("names", model), (await snapshot.queue(model)).tenants)
    names = sorted({*active, *await _configured(snapshot, model)})
    search = params.get("q", "")
    return [name for name in names if search in name] if search else names


def _facts(stats: QueueStats) -> dict[str, Any]:
    facts = msgspec.structs.asdict(stats)
    del facts["tenants"]
    facts["bands"] = [msgspec.structs.asdict(band) for band in stats.bands]
    return facts


def _tenant_row(tenant: TenantStats, total_weight: float, configured: frozenset[str]) -> dict[str, Any]:
    waits = [lane.estimated_wait_s for lane in tenant.lanes if lane.estimated_wait_s is not None]
    return {
        "tenant": tenant.tenant,
        "waiting": tenant.depth,
        "waiting_tokens": sum(lane.num_tokens for lane in tenant.lanes),
        "running": tenant.num_running,
        "oldest_age_s": max((lane.oldest_age_s for lane in tenant.lanes), default=None),
        "estimated_wait_s": max(waits, default=None),
        "weight": tenant.weight,
        "share": tenant.weight / total_weight if total_weight and tenant.depth else None,
        "blocked_for_s": None if tenant.blocked_for_s == float("inf") else tenant.blocked_for_s,
        "is_blocked": tenant.blocked_for_s > 0,
        "has_own_policy": tenant.tenant in configured,
        "lanes": {lane.band: lane.depth for lane in tenant.lanes},
    }


async def _read_tenant(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    model, tenant = (await snapshot.check_model(field_of(params, "model"))).model, field_of(params, "tenant")
    queue = await snapshot.queue(model)
    stats, policy, own, budgets = await together(
        queue.stats(tenants=[tenant]), queue.policy(), queue.tenant_policy(tenant), read_budgets(snapshot, tenant)
    )
    tenant_stats: TenantStats = stats.tenants[0]
    effective = own or policy.tenant
    rows = [{"band": lane.band, **msgspec.structs.asdict(lane)} for lane in tenant_stats.lanes]
    return {
        "model": model,
        "tenant": tenant,
        "stats": tenant_stats,
        "rows": rows,
        "policy": effective,
        "is_own": own is not None,
        "budgets": budgets,
        "limits": _LIMITS,
        "facts": {"tenant": tenant, "policy": msgspec.structs.asdict(effective), "has_own_policy": own is not None},
    }


async def _read_policy(snapshot: PageSnapshot, params: Params, _: Access) -> View:
    model = (await snapshot.check_model(field_of(params, "model"))).model
    policy: QueuePolicy = await (await snapshot.queue(model)).policy()
    fields = msgspec.json.decode(policy.encode())
    rows = [{"setting": name, "value": value} for name, value in fields.items() if name != "tenant"]
    rows += [{"setting": f"tenant.{name}", "value": value} for name, value in fields["tenant"].items()]
    words = [_setting_words(row["setting"], row["value"]) for row in rows]
    return {"model": model, "policy": policy, "limits": _LIMITS, "rows": rows, "words": words, "facts": fields}


def _setting_words(setting: str, value: Any) -> tuple[str, str]:
    """Return the label of a setting and its value in words."""
    name = setting.removeprefix(TENANT_PREFIX)
    label, none = _LABELS.get(name, name.replace("_", " ")), {"ageing_s": "never", "warm_ttl_s": "not at all"}
    words = none.get(name, "no limit") if value is None else _VALUES.get(value) if isinstance(value, str) else None
    if words is None:
        words = ", ".join(value) if isinstance(value, list) else value if isinstance(value, str) else number(value)
    return label if name == setting else f"{label} of a tenant without a policy of its own", words


async def _pause_queue(context: ActionContext) -> str:
    model, requeues = field_of(context.form, "model"), bool(context.form.get("requeue"))
    count = await context.source.operations.pause(model, put_back=requeues)
    return f"{model} is paused; {count} running requests {'were requeued' if requeues else 'keep running'}"


async def _resume_queue(context: ActionContext) -> str:
    model = field_of(context.form, "model")
    was_paused = await context.source.operations.resume(model)
    return f"{model} is resumed" if was_paused else f"{model} was not paused"


async def _purge_queue(context: ActionContext) -> str:
    model, tenant = field_of(context.form, "model"), field_of(context.form, "tenant")
    count = await context.source.operations.purge(model, tenant, context.form.get("band", ""))
    return f"cancelled {count} waiting requests of {tenant}"


async def _configure_tenant(context: ActionContext) -> str:
    model, tenant = field_of(context.form, "model"), field_of(context.form, "tenant")
    if context.form.get("reset"):
        await context.source.operations.configure_tenant(model, tenant, None)
        return f"{tenant} uses the queue's default tenant policy"
    queue = await context.source.queue(model)
    former = await queue.tenant_policy(tenant) or (await queue.policy()).tenant
    await context.source.operations.configure_tenant(model, tenant, _changed(former, context.form))
    return f"{tenant} has its own policy, effective now, also for waiting requests"


async def _configure(context: ActionContext) -> str:
    model = field_of(context.form, "model")
    former = await (await context.source.queue(model)).policy()
    default = {
        name.removeprefix(TENANT_PREFIX): text for name, text in context.form.items() if name.startswith(TENANT_PREFIX)
    }
    policy = msgspec.structs.replace(_changed(former, context.form), tenant=_changed(former.tenant, default))
    await context.source.operations.configure(model, policy)
    return f"the queue policy of {model} is updated"


def _time_field(name: str, text: str) -> float | None:
    return number_field(name, text) if text.strip() else None


def _limit_field(name: str, text: str) -> int | None:
    return _count_field(name, text, "a positive integer, or empty for no limit") if text.strip() else None


def _count_field(name: str, text: str, form: str = "an integer") -> int:
    if not text.strip().isdecimal():
        raise ValidationError(f"{name} must be {form}, got {text!r}")
    return int(text)


def _bands_field(_: str, text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


# How the text of a form becomes a field of a policy.
_PARSERS: Mapping[str, Callable[[str, str], Any]] = {
    "bands": _bands_field,
    "default_band": lambda _, text: text,
    "ageing_s": _time_field,
    "strictness": number_field,
    "order": lambda _, text: text,
    "warm_ttl_s": _time_field,
    "affinity_ms": _count_field,
    "events_kept": _count_field,
    "weight": number_field,
    "over_quota": lambda _, text: text,
    **dict.fromkeys(_LIMITS, _limit_field),
}


def _changed(policy: P, form: Mapping[str, str]) -> P:
    """Return a policy with the fields of a form.

    Raises:
        ValidationError: a field is not of its kind, or out of range.
    """
    names = set(policy.__struct_fields__) & form.keys() & _PARSERS.keys()
    changed = msgspec.structs.replace(policy, **{name: _PARSERS[name](name, form[name]) for name in names})
    changed.__post_init__()
    return changed


SECTION = PageSection(
    pages=(
        Page(
            "queue", "/queue", "Queue · {model}", _read_queue, query=("model", "q", "from", *CHART_QUERY), nav="Queue"
        ),
        Page("tenant", "/tenant", "{tenant} · {model}", _read_tenant, query=("model", "tenant")),
        Page("policy", "/policy", "Policy · {model}", _read_policy, query=("model",), live=False),
    ),
    actions=(
        Action("/queue/pause", Role.OPERATOR, _pause_queue, "queue"),
        Action("/queue/resume", Role.OPERATOR, _resume_queue, "queue"),
        Action("/queue/purge", Role.ADMIN, _purge_queue, "tenant", confirm="tenant"),
        Action("/queue/tenant", Role.OPERATOR, _configure_tenant, "tenant"),
        Action("/queue/policy", Role.ADMIN, _configure, "policy"),
    ),
)
