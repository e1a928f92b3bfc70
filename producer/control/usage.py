"""Usage for bills: the ledgers of all models, grouped, with costs by a file of prices."""

from __future__ import annotations

import asyncio
import enum
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from ...shared.broker.ledger import DAY_S, HOUR_S, LedgerRow, LedgerSums
from ...shared.connection import CommandConnection
from ...shared.errors import ConfigurationError, ValidationError
from ...shared.keys import Keys
from ...shared.partitions import read_ledger
from ...shared.partitions.budgets import ledger_models
from ...shared.queue.budgets import ANY_MODEL, TOKENS_PER_PRICE, Price
from ...shared.values.shown import shown

# Variable that names the file of prices for every command.
PRICES_VARIABLE = "PENSTOCK_PRICES"
# Days of usage when its start is left out.
DEFAULT_DAYS = 30


class Grouping(enum.StrEnum):
    """Property by which usage is grouped. Keys are grouped by tenant and name, adapters by model and name."""

    TENANT = "tenant"
    KEY = "key"
    MODEL = "model"
    ADAPTER = "adapter"
    DAY = "day"
    HOUR = "hour"


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of prices, by the names of models; those of "*" are of all other models.

    ``currency`` is for people.
    """

    currency: str = ""
    models: dict[str, Price] = {}

    def price_of(self, model: str) -> Price | None:
        """Return the prices of a model; None if the file has none."""
        return self.models.get(model, self.models.get(ANY_MODEL))


class Usage(msgspec.Struct, kw_only=True):
    """Usage of one group. ``cost`` is None if a model of it has no price.

    Args:
        group: the tenant, the model, or the time; with ``name``, that of the key or adapter.
    """

    group: str
    name: str = ""
    sums: LedgerSums = msgspec.field(default_factory=LedgerSums)
    cost: float | None = 0.0

    def accumulate(self, sums: LedgerSums, price: Price | None) -> None:
        """Add usage of a model with these prices."""
        self.sums.accumulate(sums)
        self.cost = None if self.cost is None or price is None else self.cost + cost_of(sums, price)


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Selection of usage, from ``start`` to before ``end`` (Unix times in seconds).

    Args:
        tenant, key_name, model: only of this one; any if None.
    """

    start: int
    end: int
    by: Grouping = Grouping.TENANT
    tenant: str | None = None
    key_name: str | None = None
    model: str | None = None

    @property
    def step_s(self) -> int:
        """Seconds of the steps that the times need."""
        is_whole = self.start % DAY_S == 0 and self.end % DAY_S == 0
        return DAY_S if is_whole and self.by is not Grouping.HOUR else HOUR_S

    def selects(self, row: LedgerRow) -> bool:
        return self.tenant in (None, row.tenant) and self.key_name in (None, row.key_name)


def cost_of(sums: LedgerSums, price: Price) -> float:
    """Return the cost of some usage."""
    num_input = sums.prompt + sums.embedding - sums.cached
    parts = num_input * price.input, sums.cached * price.of_cached, sums.output * price.output
    return math.fsum(parts) / TOKENS_PER_PRICE


def read_prices(path: Path) -> Prices:
    """Read a TOML file of prices.

    Raises:
        ConfigurationError: it cannot be read, or a field is unknown or no price; the message names it.
    """
    try:
        return parse_prices(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigurationError(f"the file of prices {path} cannot be read: {error}") from error


def parse_prices(text: str) -> Prices:
    """Parse the text of a file of prices.

    Raises:
        ValidationError: it is not TOML, or a field is unknown or no price; the message names it.
    """
    try:
        return msgspec.convert(tomllib.loads(text), Prices)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValidationError(f'prices must be TOML such as [models."*"] input = 1.0: {error}') from error


def format_prices(models: Mapping[str, Price]) -> str:
    """Return prices by model as ``parse_prices`` reads them."""
    lines: list[str] = []
    for model, price in models.items():
        lines.append(f"[models.{json.dumps(model, ensure_ascii=False)}]")
        values = msgspec.structs.asdict(price)
        lines += [f"{name} = {value}" for name, value in values.items() if value is not None]
    return "\n".join(lines)


def parse_time(field: str, text: str, *, is_end: bool = False) -> int:
    """Return the Unix time of a date or an hour of UTC, as 2026-11-28 or 2026-11-28T10. An end is the end of it.

    Raises:
        ValidationError: it is neither.
    """
    for form, length in (("%Y-%m-%d", timedelta(days=1)), ("%Y-%m-%dT%H", timedelta(hours=1))):
        try:
            at = datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError:
            continue
        return int((at + length if is_end else at).timestamp())
    raise ValidationError(f"{field} must be a day or an hour of UTC, as 2026-11-28 or 2026-11-28T10, got {shown(text)}")


def usage_span(first: str | None, last: str | None, now: float) -> tuple[int, int]:
    """Return start and end of the time from ``first`` to ``last``, as ``parse_time`` reads them.

    Args:
        first: the last 30 days if None.
        last: today if None.

    Raises:
        ValidationError: one of them is no time; the message names it.
    """
    today = int(now) // DAY_S * DAY_S
    return (
        today - DEFAULT_DAYS * DAY_S if first is None else parse_time("from", first),
        today + DAY_S if last is None else parse_time("to", last, is_end=True),
    )


def show_time(at: int, step_s: int = DAY_S) -> str:
    """Return a time as ``parse_time`` reads it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d" if step_s == DAY_S else "%Y-%m-%dT%H")


async def read_usage(
    connection: CommandConnection, keys: Keys, query: UsageQuery, prices: Prices | None = None
) -> list[Usage]:
    """Return the usage of each group in order of its name.

    Raises:
        ValidationError: the time spans more steps than are retained.
    """
    if query.end <= query.start:
        raise ValidationError("to must not be before from")
    names = [query.model] if query.model is not None else await ledger_models(connection, keys)
    ledgers = await asyncio.gather(
        *(read_ledger(connection, keys, name, query.start, query.end, step_s=query.step_s) for name in names)
    )
    prices = prices or Prices()
    groups: dict[tuple[str, str], Usage] = {}
    for model, rows in zip(names, ledgers, strict=True):
        for row in filter(query.selects, rows):
            group, name = _group(query, model, row)
            usage = groups.setdefault((group, name), Usage(group=group, name=name))
            usage.accumulate(row.sums, prices.price_of(model))
    return [groups[key] for key in sorted(groups)]


def total_of(usages: Sequence[Usage]) -> Usage:
    """Return the sum of groups."""
    total = Usage(group="total")
    for usage in usages:
        total.sums.accumulate(usage.sums)
        total.cost = None if total.cost is None or usage.cost is None else total.cost + usage.cost
    return total


def _group(query: UsageQuery, model: str, row: LedgerRow) -> tuple[str, str]:
    match query.by:
        case Grouping.TENANT:
            return row.tenant, ""
        case Grouping.KEY:
            return row.tenant, row.key_name
        case Grouping.MODEL:
            return model, ""
        case Grouping.ADAPTER:
            return model, row.adapter
        case Grouping.DAY:
            return show_time(row.at - row.at % DAY_S), ""
        case Grouping.HOUR:
            return show_time(row.at, HOUR_S), ""
