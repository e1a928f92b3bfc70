"""One model's queue: bands, tenants with their lanes and shares; pausing, purging, and who may have how much."""

from __future__ import annotations

from typing import Any

import msgspec

from ....producer.operator_keys import Role
from ....shared.errors import ValidationError
from ....shared.queue.policy import QueuePolicy, TenantPolicy
from ....shared.queue.stats import QueueStats, TenantStats
from ..access import Access
from ..charts import facts_of, read_charts
from ..page import Act, Action, Page, Params, Room, View, field_of
from ..source import Moment, together

PAGE_ROWS = 100
# So many are put in order of what they have waiting; of more those of a page are looked at, in order of their names.
MOST_SORTED = 500
_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent_requests",
    "max_queue_depth",
    "max_queue_tokens",
)


async def _read(moment: Moment, params: Params, _: Access) -> View:
    model = await _model(moment, params)
    if not model:
        return {"model": "", "rows": [], "models": []}
    queue = await moment.queue(model)
    policy, names = await together(moment.once(("policy", model), queue.policy), _names(moment, model, params))
    first = max(0, int(params["from"])) if params.get("from", "").isdecimal() else 0
    is_sorted = len(names) <= MOST_SORTED
    wanted = names if is_sorted else names[first : first + PAGE_ROWS]
    stats: QueueStats = await moment.once(("tenants", model, tuple(wanted)), lambda: queue.stats(tenants=wanted))
    shown = stats.tenants[first : first + PAGE_ROWS] if is_sorted else stats.tenants
    history = await read_charts(moment, [model], params)
    total_weight = sum(tenant.weight for tenant in stats.tenants if tenant.depth) if is_sorted else 0.0
    return {
        "model": model,
        "models": list(await moment.models()),
        "stats": stats,
        "policy": policy,
        "history": history,
        "rows": [_row(tenant, total_weight) for tenant in shown],
        "num_tenants": len(names),
        "first": first,
        "next": first + PAGE_ROWS if first + PAGE_ROWS < len(names) else None,
        "is_sorted": is_sorted,
        "facts": {**_facts(stats), "series": facts_of(history)},
    }


async def _model(moment: Moment, params: Params) -> str:
    """The one that is asked for, else the first there is."""
    if params.get("model"):
        return (await moment.check_model(params["model"])).model
    return next(iter(await moment.models()), "")


async def _names(moment: Moment, model: str, params: Params) -> list[str]:
    names = await moment.once(("names", model), (await moment.queue(model)).tenants)
    wanted = params.get("q", "")
    return [name for name in names if wanted in name] if wanted else names


def _facts(stats: QueueStats) -> dict[str, Any]:
    facts = msgspec.structs.asdict(stats)
    del facts["tenants"]
    facts["bands"] = [msgspec.structs.asdict(band) for band in stats.bands]
    return facts


def _row(tenant: TenantStats, total_weight: float) -> dict[str, Any]:
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
        "lanes": {lane.band: lane.depth for lane in tenant.lanes},
    }


async def _read_tenant(moment: Moment, params: Params, _: Access) -> View:
    model, tenant = (await moment.check_model(field_of(params, "model"))).model, field_of(params, "tenant")
    queue = await moment.queue(model)
    stats, policy, own = await together(queue.stats(tenants=[tenant]), queue.policy(), queue.tenant_policy(tenant))
    found: TenantStats = stats.tenants[0]
    effective = own or policy.tenant
    rows = [{"band": lane.band, **msgspec.structs.asdict(lane)} for lane in found.lanes]
    return {
        "model": model,
        "tenant": tenant,
        "stats": found,
        "rows": rows,
        "policy": effective,
        "is_own": own is not None,
        "limits": _LIMITS,
        "facts": {"tenant": tenant, "policy": msgspec.structs.asdict(effective), "has_own_policy": own is not None},
    }


async def _read_policy(moment: Moment, params: Params, _: Access) -> View:
    model = (await moment.check_model(field_of(params, "model"))).model
    policy: QueuePolicy = await (await moment.queue(model)).policy()
    fields = msgspec.json.decode(policy.encode())
    rows = [{"setting": name, "value": value} for name, value in fields.items() if name != "tenant"]
    rows += [{"setting": f"tenant.{name}", "value": value} for name, value in fields["tenant"].items()]
    return {"model": model, "policy": policy, "rows": rows, "facts": fields}


async def _pause(act: Act) -> str:
    model, running = field_of(act.form, "model"), act.form.get("running", "run on")
    if running not in ("run on", "put back"):
        raise ValidationError(f"running must be 'run on' or 'put back', got {running!r}")
    count = await act.source.operations.pause(model, put_back=running == "put back")
    return f"{model} is paused; {count} requests were running and {'wait again' if running == 'put back' else running}"


async def _resume(act: Act) -> str:
    model = field_of(act.form, "model")
    was_paused = await act.source.operations.resume(model)
    return f"{model} hands out requests again" if was_paused else f"{model} was not paused"


async def _purge(act: Act) -> str:
    model, tenant = field_of(act.form, "model"), field_of(act.form, "tenant")
    count = await act.source.operations.purge(model, tenant, act.form.get("band", ""))
    return f"{count} waiting requests of {tenant} are cancelled"


async def _configure_tenant(act: Act) -> str:
    model, tenant = field_of(act.form, "model"), field_of(act.form, "tenant")
    if act.form.get("reset"):
        await act.source.operations.configure_tenant(model, tenant, None)
        return f"{tenant} has what the queue gives every tenant"
    limits: dict[str, Any] = {name: _limit(name, act.form.get(name, "")) for name in _LIMITS}
    policy = TenantPolicy(
        weight=_number("weight", act.form.get("weight", "1")),
        over_quota=act.form.get("over_quota", "wait"),  # type: ignore[arg-type]  # it is checked, and its error named
        **limits,
    )
    await act.source.operations.configure_tenant(model, tenant, policy)
    return f"{tenant} has a policy of its own; it counts from now on, and for what waits as well"


async def _configure(act: Act) -> str:
    model = field_of(act.form, "model")
    policy = await (await act.source.queue(model)).policy()
    changed = msgspec.structs.replace(
        policy,
        strictness=_number("strictness", act.form.get("strictness", "")),
        ageing_s=_number("ageing_s", act.form["ageing_s"]) if act.form.get("ageing_s") else None,
        order=act.form.get("order", ""),
        max_queue_depth=_limit("max_queue_depth", act.form.get("max_queue_depth", "")),
    )
    changed.__post_init__()
    await act.source.operations.configure(model, changed)
    return f"the queue of {model} has its new policy"


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValidationError(f"{name} must be a number, got {text!r}") from None


def _limit(name: str, text: str) -> int | None:
    if not text.strip():
        return None
    if not text.strip().isdecimal():
        raise ValidationError(f"{name} must be a positive integer, or empty for no limit, got {text!r}")
    return int(text)


ROOM = Room(
    pages=(
        Page("queue", "/queue", "Queue · {model}", _read, query=("model", "q", "from", "span"), nav="Queue"),
        Page("tenant", "/tenant", "{tenant} · {model}", _read_tenant, query=("model", "tenant")),
        Page("policy", "/policy", "Policy · {model}", _read_policy, query=("model",), live=False),
    ),
    actions=(
        Action("/queue/pause", Role.OPERATOR, _pause, "queue"),
        Action("/queue/resume", Role.OPERATOR, _resume, "queue"),
        Action("/queue/purge", Role.ADMIN, _purge, "tenant", confirm="tenant"),
        Action("/queue/tenant", Role.OPERATOR, _configure_tenant, "tenant"),
        Action("/queue/policy", Role.ADMIN, _configure, "policy"),
    ),
)
