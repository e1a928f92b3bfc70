"""``penstock models``: what has been served on this Redis."""

from __future__ import annotations

import argparse
import asyncio

import msgspec

from ...producer import Client
from ...shared.command_line import Command, add_redis_arguments, format_table
from ...shared.embedded import resolve_redis_url
from ...shared.records import ModelCard

_HEADER = ("MODEL", "ARCHITECTURE", "MAX LEN", "VOCABULARY", "DTYPE")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_redis_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one array of model cards")


def _run(arguments: argparse.Namespace) -> int:
    with resolve_redis_url(arguments.redis_url) as url:
        cards = asyncio.run(_read(url, arguments.namespace))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(cards)).decode())
    elif cards:
        print(format_table(_HEADER, [_row(card) for card in cards]))
    else:
        print("no models: no worker has served here yet")
    return 0


async def _read(url: str, namespace: str) -> list[ModelCard]:
    async with Client.connect(url, namespace=namespace) as client:
        cards = await client.models()
    return [cards[name] for name in sorted(cards)]


def _row(card: ModelCard) -> list[str]:
    return [card.model, card.architecture, str(card.max_model_len), str(card.vocab_size), card.dtype]


COMMAND = Command("models", "Show the models known to this Redis.", run=_run, add_arguments=_add_arguments)
