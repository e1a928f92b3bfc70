"""Common parts of commands: connection, choice of the model, confirmation, JSON, and libraries that only some need."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...producer.control.operations import Operations
from ...producer.control.usage import PRICES_VARIABLE, Prices, read_prices
from ...producer.requests.model_cards import ModelCards
from ...shared.broker import Queue
from ...shared.connection import CommandConnection
from ...shared.deployment.audit import acting_as, process_actor
from ...shared.errors import ConfigurationError
from ...shared.keys import Keys
from ...shared.params.sampling import SamplingParams
from ...shared.partitions import open_queue
from ...shared.process.command_line import UsageError
from ...shared.redis_access.embedded import resolve_redis_url
from ...shared.shards import check_servers, make_commands
from ...shared.values.distribution import install_command

T = TypeVar("T")


@dataclass(frozen=True)
class OpenModel:
    """A model of a deployment. ``served`` are the names that workers have served.

    The model may be another one if requests wait for it. Commands make changes through ``operations``, which the audit
    records.
    """

    connection: CommandConnection
    keys: Keys
    name: str
    served: frozenset[str]
    operations: Operations

    @property
    def was_served(self) -> bool:
        return self.name in self.served

    async def queue(self) -> Queue:
        """Return the queue of the model over all partitions."""
        return await open_queue(self.connection, self.keys, self.name)


def run_on_redis(
    work: Callable[[CommandConnection, Keys, argparse.Namespace], Awaitable[T]], arguments: argparse.Namespace
) -> T:
    """Run ``work`` on the deployment that the arguments name."""

    async def on(url: str) -> T:
        await check_servers(url, arguments.shards, namespace=arguments.namespace)
        keys = Keys(arguments.namespace)
        connection = make_commands(url, arguments.shards, keys)
        try:
            with acting_as(process_actor("cli")):
                return await work(connection, keys, arguments)
        finally:
            await connection.close()

    with resolve_redis_url(arguments.redis_url) as url:
        return asyncio.run(on(url))


def run_on_model(
    work: Callable[[OpenModel, argparse.Namespace], Awaitable[T]],
    arguments: argparse.Namespace,
    *,
    wait_for_model: bool = False,
) -> T:
    """Run ``work`` on the model that the arguments name, or on the only model.

    Args:
        wait_for_model: whether to accept a model that was never served.

    Raises:
        UnknownModelError: no worker has ever served the model, or any model.
        ValidationError: the arguments name no model, and several exist.
    """

    async def find_and_work(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> T:
        cards = ModelCards(connection, keys, default=None, wait_for_model=wait_for_model)
        served, awaited = await cards.read_with_awaited()
        name = arguments.model if arguments.model in awaited else (await cards.find(arguments.model)).model
        operations = Operations(connection, keys)
        return await work(OpenModel(connection, keys, name, frozenset(served), operations), arguments)

    return run_on_redis(find_and_work, arguments)


def on_model(
    work: Callable[[OpenModel, argparse.Namespace], Awaitable[None]], *, wait_for_model: bool = False
) -> Callable[[argparse.Namespace], int]:
    """Return a command's ``run`` that calls ``run_on_model`` with ``work``."""

    def run(arguments: argparse.Namespace) -> int:
        run_on_model(work, arguments, wait_for_model=wait_for_model)
        return 0

    return run


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: str = "1.0") -> None:
    """Add the arguments that ``sampling_params`` reads besides ``--max-tokens``, whose default is the command's.

    Args:
        temperature: the command's default, for its help.
    """
    parser.add_argument("--temperature", type=float, metavar="T", help=f"0 is greedy ({temperature})")
    parser.add_argument("--seed", type=int, metavar="N", help="fixes the random choices")


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Return the parameters that the arguments set; others have their defaults.

    Raises:
        ValidationError: a value is out of range.
    """
    options = {name: value for name in ("temperature", "seed") if (value := getattr(arguments, name)) is not None}
    return SamplingParams(max_tokens=arguments.max_tokens, **options)


def add_prices_argument(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the argument that names the file of prices."""
    parser.add_argument(
        "--prices", type=Path, metavar="FILE", help=f"prices by model (TOML), {purpose} (default: {PRICES_VARIABLE})"
    )


def chosen_prices(arguments: argparse.Namespace) -> Prices | None:
    """Return the prices of the file that ``--prices`` or the variable names; None if neither names one.

    Raises:
        ConfigurationError: the file cannot be read, or a field is unknown or no price.
    """
    path = arguments.prices or os.environ.get(PRICES_VARIABLE)
    return read_prices(Path(path)) if path else None


def print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def confirmed(question: str, arguments: argparse.Namespace) -> bool:
    """Return whether ``--yes`` was passed, or the user confirms at the terminal.

    Raises:
        UsageError: standard input is no terminal, and ``--yes`` was not passed.
    """
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"without a terminal to ask on, --yes must be given: {question}")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def need_libraries(user: str, *names: str, extra: str) -> None:
    """Check that libraries are installed, before an import fails.

    Args:
        user: what needs them, as the subject of the message.
        names: the packages, as they are imported.
        extra: extra that installs them.

    Raises:
        ConfigurationError: a library is not installed.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"{user} needs {', '.join(missing)}: {install_command(extra)}")
