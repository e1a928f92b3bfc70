"""The ledger of a model: the use of each tenant, by API key and adapter, in each hour and each day (UTC).

The scripts that end requests write it (``scripts/parts/ledger.lua``), so each token counts once, whatever dies. Hours
are retained for 90 days, days for three years.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

from ..connection import CommandConnection
from ..errors import ValidationError
from ..keys import ModelKeys
from ..values.shown import shown
from .script import run_script

HOUR_S, DAY_S = 3600, 86400
# Seconds of a step, and for how many seconds its sums are retained.
RETAINED_S = {HOUR_S: 90 * DAY_S, DAY_S: 3 * 366 * DAY_S}
_AT_ONCE = 100
_decode = msgspec.msgpack.Decoder(list[int]).decode


class LedgerSums(msgspec.Struct, kw_only=True):
    """Use of requests. Each answer to one prompt is a request, and the first one has the prompt.

    Args:
        finished, cancelled, expired, failed, parked: requests by their end.
        prompt: prompt tokens, without those of ``embedding``; the ``cached`` ones of both are included.
        output: tokens that were delivered.
        embedding: prompt tokens of requests without output: embeddings and scores.
        recomputed: prompt and output tokens that an engine computed again after the death of another. Not part of the
            others.
        images: images of prompts.
    """

    finished: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    parked: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    embedding: int = 0
    recomputed: int = 0
    images: int = 0

    @property
    def num_requests(self) -> int:
        return self.finished + self.cancelled + self.expired + self.failed + self.parked

    def accumulate(self, other: LedgerSums) -> None:
        """Add the sums of other requests."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a tenant in one step, with one key and adapter; these are empty without.

    Args:
        at: Unix time in seconds at which the step begins.
        tenant, key_name, adapter: "*" if there were too many to count each.
    """

    at: int
    tenant: str
    key_name: str
    adapter: str
    sums: LedgerSums


class Ledger:
    """All methods raise ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries.

    Args:
        parts: keys of each partition of the model.
    """

    def __init__(self, connection: CommandConnection, parts: Sequence[ModelKeys]) -> None:
        self._connection = connection
        self._parts = parts

    async def read(self, start: int, end: int, *, step_s: int = DAY_S) -> list[LedgerRow]:
        """Return the use in the steps that begin from ``start`` to before ``end`` (Unix times), the oldest first.

        Args:
            step_s: 3600 or 86400. A row of a step and account appears once per partition.

        Raises:
            ValidationError: ``step_s`` is another one, or there are too many steps.
        """
        if step_s not in RETAINED_S:
            raise ValidationError(f"step_s must be one of {', '.join(map(str, RETAINED_S))}, got {shown(step_s)}")
        starts = range(start - start % step_s, end, step_s)
        if len(starts) > RETAINED_S[step_s] // step_s + 1:
            raise ValidationError(
                f"start must be at most {RETAINED_S[step_s] // DAY_S} days before end for steps of {step_s} s"
            )
        rows: list[LedgerRow] = []
        remaining = iter(starts)
        while part := list(islice(remaining, _AT_ONCE)):
            for keys in self._parts:
                args = [step_s, *part]
                hashes = await run_script(self._connection, keys, "read_ledger", [keys.leases], args)
                rows += [row for at, flat in zip(part, hashes, strict=True) for row in _ledger_rows(at, flat)]
        rows.sort(key=lambda row: row.at)
        return rows


def _ledger_rows(at: int, flat: Sequence[bytes]) -> Iterable[LedgerRow]:
    for field, value in zip(flat[::2], flat[1::2], strict=True):
        names = field.decode(errors="replace").split("\n")
        try:
            tenant, key_name, adapter = names
            sums = LedgerSums(**dict(zip(LedgerSums.__struct_fields__, _decode(value), strict=False)))
        except (ValueError, msgspec.MsgspecError):
            continue  # something other than the scripts has written it
        yield LedgerRow(at=at, tenant=tenant, key_name=key_name, adapter=adapter, sums=sums)
