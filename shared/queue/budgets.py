"""Budgets of tenants and API keys: tokens or costs per day, per month, or in all."""

from __future__ import annotations

import enum
import math
from datetime import UTC, datetime, timedelta

import msgspec

from ..errors import ValidationError
from ..values.checks import check_text
from ..values.names import check_name
from ..values.shown import shown

TOKENS_PER_PRICE = 1_000_000
# Prices of all models that have none of their own.
ANY_MODEL = "*"


class Period(enum.StrEnum):
    """Time after which a budget is renewed, in UTC; "all" never is."""

    DAY = "day"
    MONTH = "month"
    ALL = "all"

    def bounds(self, now: float) -> tuple[int, int | None]:
        """Return start and end of the current period as Unix times; 0 and None for "all"."""
        if self is Period.ALL:
            return 0, None
        start = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        end = start + timedelta(days=1)
        if self is Period.MONTH:
            start = start.replace(day=1)
            end = (start + timedelta(days=32)).replace(day=1)
        return int(start.timestamp()), int(end.timestamp())


# Periods for people.
PERIOD_WORDS = {Period.DAY: "per day", Period.MONTH: "per month", Period.ALL: "in all"}


class Unit(enum.StrEnum):
    """Unit of a budget."""

    TOKENS = "tokens"
    COST = "cost"


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of a million tokens of a model. ``input`` is of prompt tokens that were not cached, also of embeddings.

    ``cached`` is ``input`` if it is left out.
    """

    input: float = 0.0
    cached: float | None = None
    output: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be at least 0")

    @property
    def of_cached(self) -> float:
        return self.input if self.cached is None else self.cached


_TOKENS = Price(input=TOKENS_PER_PRICE, output=TOKENS_PER_PRICE)


class Budget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A limit of the use of a tenant, or of one of its API keys if ``key_name`` is not empty, over all models.

    Args:
        limit: in tokens (prompt, output and embedding), or in the currency of ``prices``.
        since: Unix time from which on a budget of "all" counts.
        prices: of a budget of costs, by model; a model without a price costs nothing.
        webhook_url: notified at 80 % and 100 %.
    """

    version: int = 1
    tenant: str
    key_name: str = ""
    period: Period = Period.MONTH
    unit: Unit = Unit.TOKENS
    limit: float
    since: int = 0
    prices: dict[str, Price] = {}
    webhook_url: str = ""

    @property
    def name(self) -> str:
        """Name under which the budget is stored."""
        return "\n".join((self.tenant, self.key_name, self.period))

    def validated(self) -> Budget:
        """Return the budget if its values are valid.

        Raises:
            ValidationError: a value is invalid; the message names it.
        """
        check_name("tenant", self.tenant)
        check_text("key_name", self.key_name)
        if not (math.isfinite(self.limit) and 0 < self.limit < 2**53):
            raise ValidationError(f"limit must be positive and below 2**53, got {shown(self.limit)}")
        if self.unit is Unit.COST and not self.prices:
            raise ValidationError("a budget of costs needs prices; pass a file of prices")
        return self

    def definition(self, model: str) -> str:
        """Return the definition for the scripts of a model, as JSON."""
        price = self.prices.get(model, self.prices.get(ANY_MODEL, Price())) if self.unit is Unit.COST else _TOKENS
        weights = {"input": price.input, "cached": price.of_cached, "output": price.output}
        fields = {name: weight / TOKENS_PER_PRICE for name, weight in weights.items()}
        whole = {"unit": self.unit, "limit": self.limit, "period": self.period, "since": self.since, **fields}
        return msgspec.json.encode(whole).decode()


class BudgetState(msgspec.Struct, frozen=True, kw_only=True):
    """A budget and the amount spent in the period that began at ``start``. ``renewed_at`` is None for "all"."""

    budget: Budget
    spent: float
    start: int
    renewed_at: int | None

    @property
    def share(self) -> float:
        return self.spent / self.budget.limit
