"""``penstock models``: models that have been served on this Redis."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter

import msgspec

from ....producer import Client
from ....producer.requests.health import may_serve
from ....shared.deployment.records import ModelCard
from ....shared.process.command_line import Command, add_redis_arguments, format_table
from ....shared.redis_access.embedded import resolve_redis_url

_HEADER = ("MODEL", "ARCHITECTURE", "MAX LEN", "VOCABULARY", "DTYPE", "ENGINES")


def _add_models_arguments(parser: argparse.ArgumentParser) -> None:
    add_redis_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one array of model cards")
    parser.add_argument(
        "--forget", metavar="NAME", help="remove a model from the list that no engine serves and no request waits for"
    )


def _run_models(arguments: argparse.Namespace) -> int:
    with resolve_redis_url(arguments.redis_url) as url:
        if arguments.forget is not None:
            asyncio.run(_forget(url, arguments))
            print(f"forgotten: {arguments.forget}")
            return 0
        cards, num_engines = asyncio.run(_read_models(url, arguments))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(cards)).decode())
    elif cards:
        print(format_table(_HEADER, [_model_row(card, num_engines[card.model]) for card in cards]))
    else:
        print("no models: no worker has served on this Redis yet")
    return 0


async def _read_models(url: str, arguments: argparse.Namespace) -> tuple[list[ModelCard], Counter[str]]:
    """Return the cards by name, and the number of engines that serve each model or are starting."""
    async with Client.connect(url, namespace=arguments.namespace, shards=arguments.shards) as client:
        cards = await client.models()
        engines = [engine for name in cards for engine in await client.engines(name) if may_serve(engine)]
    return [cards[name] for name in sorted(cards)], Counter(engine.model for engine in engines)


async def _forget(url: str, arguments: argparse.Namespace) -> None:
    async with Client.connect(url, namespace=arguments.namespace, shards=arguments.shards) as client:
        await client.forget_model(arguments.forget)


def _model_row(card: ModelCard, num_engines: int) -> list[str]:
    size = [str(card.max_model_len), str(card.vocab_size)]
    return [card.model, card.architecture, *size, card.dtype, str(num_engines or "none")]


COMMAND = Command(
    "models", "Show the models known to this Redis.", run=_run_models, add_arguments=_add_models_arguments
)
