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
from ...control.usage import Grouping, Usage, UsageQuery, read_usage, usage_span
from ...openai.errors import bad_field
from ..http import gateway_of, json_response
from ..operations import Operation

_GROUPINGS = [grouping.value for grouping in Grouping if grouping is not Grouping.TENANT]


class UsageEntry(msgspec.Struct, kw_only=True):
    """Use of one group: a key, model, adapter, or time. ``num_input_tokens`` include the cached ones.

    ``num_recomputed_tokens`` were computed again after the death of an engine, and are not part of the others.
    """

    group: str
    num_requests: int
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_embedding_tokens: int
    num_recomputed_tokens: int
    num_images: int


class UsagePage(msgspec.Struct, kw_only=True):
    """Use of a tenant from ``start_time`` to before ``end_time`` (Unix times)."""

    object: Literal["list"] = "list"
    tenant: str
    by: str
    start_time: int
    end_time: int
    data: list[UsageEntry]


async def retrieve_usage(request: Request) -> Response:
    """Answer GET /v1/usage."""
    gateway, tenant, params = gateway_of(request), request.state.identity.tenant, request.query_params
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
        usages = await read_usage(gateway.connection, Keys(gateway.settings.namespace), query)
    except ValidationError as error:
        raise bad_field("from", str(error)) from error
    entries = [_usage_entry(usage, query) for usage in usages]
    page = UsagePage(tenant=tenant, by=by, start_time=query.start, end_time=query.end, data=entries)
    return json_response(page)


def _usage_entry(usage: Usage, query: UsageQuery) -> UsageEntry:
    has_name = query.by in (Grouping.KEY, Grouping.ADAPTER)
    sums = usage.sums
    return UsageEntry(
        group=usage.name if has_name else usage.group,
        num_requests=sums.num_requests,
        num_input_tokens=sums.prompt,
        num_cached_tokens=sums.cached,
        num_output_tokens=sums.output,
        num_embedding_tokens=sums.embedding,
        num_recomputed_tokens=sums.recomputed,
        num_images=sums.images,
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
