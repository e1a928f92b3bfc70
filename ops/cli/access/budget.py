"""``penstock budget``: limits of the use of tenants and API keys per day, per month, or in all."""

from __future__ import annotations

import argparse
from functools import partial

import msgspec

from ....producer.control.operations import Operations
from ....producer.control.usage import PRICES_VARIABLE, Prices, show_time
from ....shared.connection import CommandConnection
from ....shared.keys import Keys
from ....shared.partitions.budgets import sync_budgets
from ....shared.process.command_line import EXIT_FAILED, Command, UsageError, add_redis_arguments, format_table
from ....shared.queue.budgets import Budget, BudgetState, Period, Unit
from ....shared.values.shown import format_number
from ..command_parts import add_prices_argument, chosen_prices, print_json, run_on_redis

_HEADER = ("TENANT", "KEY", "PERIOD", "SPENT", "LIMIT", "UNIT", "SHARE", "RENEWED", "WEBHOOK")


def _add_name_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant")
    parser.add_argument("--key", default="", metavar="NAME", help="only of the tenant's API keys of this name")
    parser.add_argument("--per", type=Period, choices=list(Period), default=Period.MONTH, help="(month)")


def _add_set_arguments(parser: argparse.ArgumentParser) -> None:
    _add_name_arguments(parser)
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--tokens", type=float, metavar="N", help="prompt, output and embedding tokens")
    limit.add_argument("--cost", type=float, metavar="AMOUNT", help="by the prices of --prices")
    add_prices_argument(parser, "stored with a budget of costs")
    parser.add_argument("--webhook", default="", metavar="URL", help="notified at 80 %% and 100 %%")
    add_redis_arguments(parser)


async def _set_budget(
    prices: Prices | None, connection: CommandConnection, keys: Keys, arguments: argparse.Namespace
) -> None:
    budget = Budget(
        tenant=arguments.tenant,
        key_name=arguments.key,
        period=arguments.per,
        unit=Unit.TOKENS if arguments.cost is None else Unit.COST,
        limit=arguments.tokens if arguments.cost is None else arguments.cost,
        prices={} if prices is None else prices.models,
        webhook_url=arguments.webhook,
    ).validated()
    await Operations(connection, keys).set_budget(budget)
    states = await sync_budgets(connection, keys)
    print(_budget_table([state for state in states if state.budget.name == budget.name]))


def _run_set_budget(arguments: argparse.Namespace) -> int:
    prices = None if arguments.cost is None else chosen_prices(arguments)
    if arguments.prices is not None and arguments.cost is None:
        raise UsageError("--prices is for --cost; leave it out for a limit in tokens")
    if arguments.cost is not None and prices is None:
        raise UsageError(f"--cost needs --prices FILE, or {PRICES_VARIABLE}")
    run_on_redis(partial(_set_budget, prices), arguments)
    return 0


async def _remove_budget(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> int:
    budget = Budget(tenant=arguments.tenant, key_name=arguments.key, period=arguments.per, limit=1)
    if not await Operations(connection, keys).remove_budget(budget):
        print("no such budget; `penstock budget list` shows all")
        return EXIT_FAILED
    await sync_budgets(connection, keys)
    return 0


def _add_remove_arguments(parser: argparse.ArgumentParser) -> None:
    _add_name_arguments(parser)
    add_redis_arguments(parser)


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one array, with every field")
    add_redis_arguments(parser)


async def _show_budgets(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> int:
    states = await sync_budgets(connection, keys)
    if arguments.json:
        print_json([{**msgspec.to_builtins(state), "share": state.share} for state in states])
    else:
        print(_budget_table(states) if states else "no budgets are set")
    return 0


def _budget_table(states: list[BudgetState]) -> str:
    return format_table(_HEADER, [_budget_row(state) for state in states])


def _budget_row(state: BudgetState) -> tuple[str, ...]:
    budget = state.budget
    amounts = (format_number(float(f"{amount:.10g}"), separator=",") for amount in (state.spent, budget.limit))
    renewed = "never" if state.renewed_at is None else show_time(state.renewed_at)
    names = budget.tenant, budget.key_name or "-", budget.period.value
    return (*names, *amounts, budget.unit.value, f"{state.share:.0%}", renewed, budget.webhook_url or "-")


COMMAND = Command(
    "budget",
    "Limit the use of tenants and API keys.",
    subcommands=(
        Command("set", "Set a budget, or change it.", run=_run_set_budget, add_arguments=_add_set_arguments),
        Command(
            "list",
            "Show all budgets, and the amounts spent.",
            run=partial(run_on_redis, _show_budgets),
            add_arguments=_add_list_arguments,
        ),
        Command(
            "remove",
            "Remove a budget.",
            run=partial(run_on_redis, _remove_budget),
            add_arguments=_add_remove_arguments,
        ),
    ),
)
