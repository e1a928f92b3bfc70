"""Metrics of usage and budgets, with a bounded number of labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...shared.broker.ledger import DAY_S
from ...shared.connection import CommandConnection
from ...shared.keys import Keys
from ...shared.metrics import Sample, values_of
from ...shared.partitions import read_ledger
from ...shared.partitions.budgets import sync_budgets

# Tenants with labels of their own, the largest of each model; the others share one.
MAX_TENANTS = 50
MAX_BUDGETS = 200
OTHERS = "*"
_KINDS = ("prompt", "cached", "output", "embedding", "recomputed")


async def usage_samples(connection: CommandConnection, keys: Keys, models: Sequence[str]) -> list[Sample]:
    """Return the tokens of today (UTC) by model and tenant, and the spent shares of budgets."""
    now = int((await connection.execute("TIME"))[0])
    samples: list[Sample] = []
    for model in models:
        tokens: dict[str, Counter[str]] = {}
        for row in await read_ledger(connection, keys, model, now - now % DAY_S, now + 1):
            counts = {kind: getattr(row.sums, kind) for kind in _KINDS}
            tokens.setdefault(row.tenant, Counter()).update(counts)
        for tenant, counts in _largest(tokens).items():
            for kind in _KINDS:
                samples += values_of((model, tenant, kind), {"tenant_tokens_today": counts[kind]})
    for state in (await sync_budgets(connection, keys))[:MAX_BUDGETS]:
        budget = state.budget
        samples += values_of((budget.tenant, budget.key_name, budget.period), {"budget_used_share": state.share})
    return samples


def _largest(tokens: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Return the tenants with the most tokens, and the sum of the others."""
    by_size = sorted(tokens, key=lambda tenant: (-tokens[tenant].total(), tenant))
    result = {tenant: tokens[tenant] for tenant in by_size[:MAX_TENANTS]}
    for tenant in by_size[MAX_TENANTS:]:
        result.setdefault(OTHERS, Counter()).update(tokens[tenant])
    return result
