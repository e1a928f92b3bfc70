"""``penstock lora``: names of adapters, and the engines that have them loaded."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from ....producer import Client
from ....shared.connection import CommandConnection
from ....shared.deployment.audit import acting_as, process_actor
from ....shared.deployment.presence import read_heartbeats
from ....shared.keys import Keys
from ....shared.lora.registry import AdapterRecord, AdapterRegistry, owner
from ....shared.process.command_line import Command, add_redis_arguments, format_table
from ....shared.redis_access.embedded import resolve_redis_url
from ....shared.values.shown import format_bytes
from ..command_parts import print_json, run_on_redis

_HEADER = ("NAME", "MODEL", "TENANT", "RANK", "SIZE", "NUMBER", "PINNED", "LOADED BY", "DIGEST", "PATH")
_FOLDER_VARIABLE = "PENSTOCK_ADAPTERS_DIR"
_SHOWN_DIGITS = 12

Work = Callable[[Client, argparse.Namespace], Awaitable[None]]


def _run_with_client(work: Work) -> Callable[[argparse.Namespace], int]:
    async def run(url: str, arguments: argparse.Namespace) -> None:
        # A name may be created before the first worker of its model.
        options = {"namespace": arguments.namespace, "shards": arguments.shards, "wait_for_model": True}
        async with Client.connect(url, **options) as client:
            with acting_as(process_actor("cli")):
                await work(client, arguments)

    def of(arguments: argparse.Namespace) -> int:
        with resolve_redis_url(arguments.redis_url) as url:
            asyncio.run(run(url, arguments))
        return 0

    return of


async def _add_adapter(client: Client, arguments: argparse.Namespace) -> None:
    record, former = await client.register_lora(
        arguments.name,
        arguments.path,
        tenant=arguments.tenant,
        copy_to=arguments.copy_to or os.environ.get(_FOLDER_VARIABLE),
        model=arguments.model,
    )
    whose = owner(record.tenant) if record.tenant else "everybody"
    size = f"rank {record.rank}, {format_bytes(record.num_bytes)}"
    print(f"{record.name} of model {record.model} is adapter {_short(record)} for {whose} ({size}): {record.path}")
    if former is not None and former.digest != record.digest:
        print(f"it was {_short(former)}; requests enqueued before keep using that one")
    if arguments.no_load:
        return
    loaded = await client.load_registered(record, former)
    if loaded:
        print(f"loaded by {', '.join(sorted(loaded))}")
    else:
        print(f"no engine of {record.model} is running; each loads it with the first request that uses it")


async def _pin(client: Client, arguments: argparse.Namespace) -> None:
    engines = await client.pin_lora(arguments.name, tenant=arguments.tenant)
    print(f"{arguments.name} is pinned: engines load it when they start, and keep it{_by(engines)}")


async def _unpin(client: Client, arguments: argparse.Namespace) -> None:
    engines = await client.unpin_lora(arguments.name, tenant=arguments.tenant)
    print(f"{arguments.name} is pinned no more{_by(engines)}")


async def _remove(client: Client, arguments: argparse.Namespace) -> None:
    engines = await client.remove_lora(arguments.name, tenant=arguments.tenant)
    print(f"{arguments.name} is removed; requests enqueued before keep using it{_by(engines)}")


def _by(engines: dict[str, bool]) -> str:
    return f" ({', '.join(sorted(engines))})" if engines else ""


async def _list_adapters(connection: CommandConnection, keys: Keys, arguments: argparse.Namespace) -> int:
    records = await AdapterRegistry(connection, keys).read(arguments.model)
    beats = await read_heartbeats(connection.execute, keys)
    num_engines = Counter((beat.model, digest) for beat in beats for digest in beat.lora_digests)
    if arguments.json:
        print_json(
            [
                msgspec.structs.asdict(record) | {"num_engines": num_engines[record.model, record.digest]}
                for record in records
            ]
        )
    elif records:
        print(
            format_table(
                _HEADER, [_adapter_row(record, num_engines[record.model, record.digest]) for record in records]
            )
        )
    else:
        print("no adapters")
    return 0


def _adapter_row(record: AdapterRecord, num_engines: int) -> list[str]:
    return [
        record.name,
        record.model,
        record.tenant or "all",
        str(record.rank),
        format_bytes(record.num_bytes),
        str(record.number),
        "yes" if record.pinned else "no",
        str(num_engines or "none"),
        _short(record),
        record.path,
    ]


def _short(record: AdapterRecord) -> str:
    return record.digest[:_SHOWN_DIGITS]


def _add_add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="as requests call it; points to this adapter from now on")
    parser.add_argument("path", metavar="PATH", help="folder that PEFT's save_pretrained wrote")
    parser.add_argument("--model", help="that it is for; may be left out if only one is known, or served")
    parser.add_argument("--tenant", help="only this tenant may use it (all tenants)")
    parser.add_argument(
        "--copy-to",
        metavar="DIR",
        help=f"copy it, under its digest, into a folder that all hosts see ({_FOLDER_VARIABLE}; else they find PATH)",
    )
    parser.add_argument("--no-load", action="store_true", help="leave loading to the first request with it")
    add_redis_arguments(parser)


def _add_adapter_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="those of this one alone")
    parser.add_argument("--json", action="store_true", help="one array, with every field")
    add_redis_arguments(parser)


def _add_name_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="as `penstock lora list` shows it")
    parser.add_argument("--tenant", help="whose it is (everybody's)")
    add_redis_arguments(parser)


def _list_on_redis(arguments: argparse.Namespace) -> int:
    return run_on_redis(_list_adapters, arguments)


COMMAND = Command(
    "lora",
    "Name adapters, and show which engines have them loaded.",
    subcommands=(
        Command(
            "add",
            "Point a name to an adapter, and load it.",
            run=_run_with_client(_add_adapter),
            add_arguments=_add_add_arguments,
        ),
        Command("list", "Show all names.", run=_list_on_redis, add_arguments=_add_adapter_list_arguments),
        Command(
            "pin",
            "Make engines load it when they start, and keep it.",
            run=_run_with_client(_pin),
            add_arguments=_add_name_arguments,
        ),
        Command(
            "unpin",
            "Let engines evict it like others.",
            run=_run_with_client(_unpin),
            add_arguments=_add_name_arguments,
        ),
        Command("remove", "Take a name away.", run=_run_with_client(_remove), add_arguments=_add_name_arguments),
    ),
)
