"""/v1/usage: the use of the caller's tenant, as the ledger has it."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....shared.errors import ValidationError
from ....shared.keys import Keys
from ....shared.values.shown import shown
from ...control.usage import Grouping, Usage, UsageQuery, read_usage, total_of, usage_span
from ...openai.errors import bad_field
from ..http import gateway_of, json_response
from ..operations import Operation

_GROUPINGS = [grouping.value for grouping in Grouping if grouping is not Grouping.TENANT]


class UsageEntry(msgspec.Struct, kw_only=True):
    """Use of one group: a key, model, adapter, or time. ``num_input_tokens`` include the cached ones.

    ``num_recomputed_tokens`` were computed again after the death of an engine, and are not part of the others.
    ``cost`` is null if the gateway has no prices, or none of a model of the group.
    """

    group: str
    num_requests: int
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_embedding_tokens: int
    num_recomputed_tokens: int
    num_images: int
    cost: float | None


class UsagePage(msgspec.Struct, kw_only=True):
    """Use of a tenant from ``start_time`` to before ``end_time`` (Unix times). ``currency`` is that of the prices."""

    object: Literal["list"] = "list"
    tenant: str
    by: str
    start_time: int
    end_time: int
    currency: str
    data: list[UsageEntry]
    total: UsageEntry


async def retrieve_usage(request: Request) -> Response:
    """Answer GET /v1/usage."""
    gateway, tenant, params = gateway_of(request), request.state.identity.tenant, request.query_params
    settings = gateway.settings
    prices = settings.prices
    by = params.get("by", Grouping.DAY.value)
    if by not in _GROUPINGS:
        raise bad_field("by", f"by must be one of {', '.join(_GROUPINGS)}, got {shown(by)}")
    start, end = usage_span(params.get("from"), params.get("to"), time.time())
    query = UsageQuery(
        start=start,
        end=end,
        by=Grouping(by),
        tenant=tenant,
        model=params.get("model"),
    )
    try:
        usages = await read_usage(gateway.connection, Keys(settings.namespace), query, prices)
    except ValidationError as error:
        raise bad_field("from", str(error)) from error
    total = total_of(usages)
    if prices is None:
        total.cost = None  # also of no usage
    has_name = query.by in (Grouping.KEY, Grouping.ADAPTER)
    page = UsagePage(
        tenant=tenant,
        by=by,
        start_time=query.start,
        end_time=query.end,
        currency=prices.currency if prices else "",
        data=[_usage_entry(usage, usage.name if has_name else usage.group) for usage in usages],
        total=_usage_entry(total, total.group),
    )
    return json_response(page)


def _usage_entry(usage: Usage, group: str) -> UsageEntry:
    sums = usage.sums
    return UsageEntry(
        group=group,
        num_requests=sums.num_requests,
        num_input_tokens=sums.prompt,
        num_cached_tokens=sums.cached,
        num_output_tokens=sums.output,
        num_embedding_tokens=sums.embedding,
        num_recomputed_tokens=sums.recomputed,
        num_images=sums.images,
        cost=usage.cost,
    )


def _query_parameter(name: str, description: str) -> dict[str, object]:
    return {"name": name, "in": "query", "description": description, "schema": {"type": "string"}}


OPERATIONS = (
    Operation(
        method="GET",
        path="/v1/usage",
        handler=retrieve_usage,
        summary="Show the use of the key's tenant",
        response=UsagePage,
        statuses=(400,),
        parameters=(
            _query_parameter("by", f"One of {', '.join(_GROUPINGS)}; day by default."),
            _query_parameter(
                "from", "First day or hour of UTC, as 2026-11-28 or 2026-11-28T10; 30 days ago by default."
            ),
            _query_parameter("to", "Last day or hour; today by default."),
            _query_parameter("model", "Only of this model."),
        ),
    ),
)
