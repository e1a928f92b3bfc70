"""Entries to enqueue, and the refusals of the enqueue script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import (
    InsufficientQuotaError,
    PenstockError,
    QueueFullError,
    QuotaExceededError,
    RequestConflictError,
    ValidationError,
    from_wire,
)
from ..params.images import ImageInput
from ..values.shown import format_number, shown

NEW = "new"
UNSERVED = "unserved"
RELAID = "relaid"
LEFT = "left"

# Time after which a caller may try again if a budget is never renewed, since an operator may raise it.
NEVER_RENEWED_S = 86_400.0

_encoder = msgspec.msgpack.Encoder()
_QUOTAS = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "max_concurrent_requests": "concurrent requests",
}


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An encoded request to enqueue.

    Args:
        client_id: client on whose lease the request depends; empty for a detached request.
        client_ttl_ms: duration of that lease from now on.
        fail_fast: refuse it if no engine holds a lease, and end it when the last engine dies.
        call: a token of this call, by which a repeated call is recognized. If the caller chose the id, digests of
            prompt, parameters and adapter follow, each after a space: the id attaches only to an equal request.
        band: one of the queue's bands; empty for its default.
        num_prompt_tokens: an estimate is enough, because the engine's count corrects it at the end.
        max_tokens: max output tokens.
        deadline_ms: time of day by the server's clock; None for no deadline.
        timeout_ms: time from now on; the earlier of deadline and timeout holds.
        is_resumable: its input may be extended until it is closed.
        webhook: encoded target to notify of the end; None without one.
        webhook_of: the request of which this is one of ``webhook_n`` answers; all are reported together.
        digests: digests of its conversation's earlier states, the longest first. By these it is routed to the
            engine that has the conversation in its cache.
        own_digests: digests by which later requests find the engine of this one.
        layout: version of the layout of the model's partitions that the caller uses; 0 while it has one.
        may_have_left: the tenant has another partition in this layout, and stays here while it must.
        adapter: digest of its adapter; empty without one.
        is_fresh: its id was generated, so no other request has it. Not on the wire.
        session_id: id of its conversation. A tenant that is spread has all of it in one partition. Not on the wire.
        images: images of its prompt, with their bytes, which are stored until it has ended.
        key_name: name of the API key that it came with, for the ledger; empty without one.
        adapter_name: name of its adapter, for the ledger.
        is_sibling: another answer to the same prompt counts the prompt in the ledger.
    """

    request_id: str
    payload: bytes
    result_ttl_ms: int
    client_id: str = ""
    client_ttl_ms: int = 0
    fail_fast: bool = False
    call: str = ""
    tenant: str = "default"
    band: str = ""
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    deadline_ms: int | None = None
    timeout_ms: int | None = None
    is_resumable: bool = False
    webhook: str | None = None
    webhook_of: str | None = None
    webhook_n: int | None = None
    digests: tuple[str, ...] = ()
    own_digests: tuple[str, ...] = ()
    layout: int = 0
    may_have_left: bool = False
    adapter: str = ""
    is_fresh: bool = False
    session_id: str = ""
    images: tuple[ImageInput, ...] = ()
    key_name: str = ""
    adapter_name: str = ""
    is_sibling: bool = False

    @property
    def account(self) -> str | None:
        """Its fields of the ledger besides the tenant (``ledger.lua``); None if they are empty."""
        account = f"{self.key_name}\n{self.adapter_name}" + ("\n1" if self.is_sibling else "")
        return None if account == "\n" else account

    @property
    def num_bytes(self) -> int:
        """Size of its large parts."""
        return len(self.payload) + sum(len(image.data) for image in self.images)


def enqueue_args(entries: Sequence[Entry]) -> list[bytes]:
    """Return the script's arguments: all small fields as one msgpack array, the payloads, and each image's bytes.

    One argument for all small fields takes a third of the client's time that thirteen for each request take.
    """
    blobs = list(dict.fromkeys(image for entry in entries for image in entry.images))
    places = {image: place for place, image in enumerate(blobs, start=1)}
    fields = [
        (
            entry.request_id,
            entry.result_ttl_ms,
            entry.client_id,
            entry.client_ttl_ms,
            entry.fail_fast,
            entry.call,
            entry.tenant,
            entry.band,
            entry.num_prompt_tokens,
            entry.max_tokens,
            entry.deadline_ms,
            entry.timeout_ms,
            entry.is_resumable,
            entry.webhook,
            entry.webhook_of,
            entry.webhook_n,
            *_optional_fields(entry, places),
        )
        for entry in entries
    ]
    return [_encoder.encode(fields), *[entry.payload for entry in entries], *[image.data for image in blobs]]


def _optional_fields(entry: Entry, places: dict[ImageInput, int]) -> tuple[Any, ...]:
    """Return the fields that most entries leave empty, and omit."""
    digests = (entry.digests, " ".join(entry.own_digests)) if entry.digests else ()
    if entry.images or entry.adapter or entry.account:
        images = [(image.digest, places[image]) for image in entry.images] or None
        place = entry.layout, entry.may_have_left, entry.adapter or None
        return (*(digests or (None, None)), *place, images, entry.account)
    return (*(digests or (None, None)), entry.layout, entry.may_have_left) if entry.layout else digests


def read_answer(entry: Entry, answer: bytes | list[Any]) -> str | PenstockError:
    """Return the script's answer, or the error for its refusal."""
    if isinstance(answer, bytes):
        return answer.decode()
    kind = answer[0]
    if kind == b"unknown_band":
        return ValidationError(f"band must be one of {answer[1].decode()}, got {shown(entry.band)}")
    if kind == b"conflict":
        return _conflict(entry, answer[1].decode())
    if kind == b"given_up":
        code, _, message = answer[1].decode().partition(" ")
        return from_wire(code, message, retryable=False)
    if kind == b"over_budget":
        return budget_refusal(shown(entry.tenant), answer)
    limit, retry_after_s = answer[-2], answer[-1] / 1000
    if kind == b"queue_full":
        scope, unit = answer[1].decode(), answer[2].decode()
        owner = "the model" if scope == "model" else f"tenant {shown(entry.tenant)}"
        name = "max_queue_depth" if unit == "requests" else "max_queue_tokens"
        return QueueFullError(
            f"the queue of {owner} is full: {name} is {limit} {unit}; try again in {retry_after_s:.1f} s, or raise it "
            f"with 'penstock queue {'configure' if scope == 'model' else 'tenant'}'",
            retry_after_s=retry_after_s,
        )
    quota = answer[1].decode()
    return QuotaExceededError(
        f"tenant {shown(entry.tenant)} is over its quota of {limit} {_QUOTAS[quota]} ({quota}); try again in "
        f"{retry_after_s:.1f} s",
        retry_after_s=retry_after_s,
    )


def budget_refusal(tenant: str, answer: list[Any]) -> InsufficientQuotaError:
    """Return the error of a refusal of ``budgets.lua``. ``tenant`` is as people read it."""
    scope, period, unit = (word.decode() for word in answer[1:4])
    limit = format_number(float(answer[4]))
    owner = f"tenant {tenant}" if scope == "tenant" else f"this API key of tenant {tenant}"
    if answer[5] < 0:
        end, retry_after_s = "it is not renewed", NEVER_RENEWED_S
    else:
        retry_after_s = answer[5] / 1000
        end = f"it is renewed in {retry_after_s:.0f} s"
    per = "" if period == "all" else f" per {period}"
    return InsufficientQuotaError(
        f"the budget of {owner} is used up: {limit} {unit}{per}; {end}, or raise it with 'penstock budget set'",
        retry_after_s=retry_after_s,
    )


def _conflict(entry: Entry, field: str) -> RequestConflictError:
    if field == "tenant":
        message = f"request_id {shown(entry.request_id)} belongs to another tenant's request; choose another id"
    else:
        message = (
            f"request_id {shown(entry.request_id)} belongs to a request with another value of {field}; choose "
            f"another id, or pass the same {field} to attach to that request"
        )
    return RequestConflictError(message, field=field)
