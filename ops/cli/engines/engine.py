"""``penstock engine``: put engines to sleep, wake, profile and inspect them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ....producer import Client
from ....producer.client_parts.core import CALL_TIMEOUT_S, CallOptions
from ....producer.control.engine_control import RELOAD_TIMEOUT_S
from ....producer.control.fleet_control import SCALE_TIMEOUT_S
from ....shared.control.engine import SLEEP_LEVELS, SLEEP_MODES, SLEEP_TAGS, SleepState
from ....shared.control.model import RELOAD_MODES, ShardedStateSaved, WeightsReloaded
from ....shared.errors import EngineCallError
from ....shared.messages.core import GroupStatus
from ....shared.process.command_line import Command, UsageError, add_redis_arguments, format_table
from ....shared.redis_access.embedded import resolve_redis_url
from ....shared.values.shown import format_bytes
from ..command_parts import print_json

# A call of the client with the options of every call; returns replies by engine id.
Ask = Callable[[Client, argparse.Namespace, CallOptions], Awaitable[dict[str, Any]]]


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="model of the engines; optional if only one exists")
    parser.add_argument("--engine", metavar="ID", help="only this one, as worker list shows it (default: all)")
    parser.add_argument("--timeout", type=float, default=CALL_TIMEOUT_S, metavar="S", help="for all answers (60)")
    parser.add_argument("--json", action="store_true", help="one object of answers by engine")
    add_redis_arguments(parser)


def _add_sleep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level", type=int, choices=SLEEP_LEVELS, default=1, help="1 keeps the weights in host memory, 2 nowhere (1)"
    )
    parser.add_argument(
        "--mode",
        choices=SLEEP_MODES,
        default="keep",
        help="running requests: requeue to resume after the last token; let them end; or abort them (keep)",
    )
    parser.add_argument("--drain-timeout", type=float, default=30.0, metavar="S", help="for --mode wait (30)")
    _add_engine_arguments(parser)


def _add_wake_up_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tag", action="append", choices=SLEEP_TAGS, help="only this part; may be given twice")
    _add_engine_arguments(parser)


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefix", default="", help="begins the names of the files")
    parser.add_argument("--with-stack", action="store_true", help="record the Python functions that call operations")
    parser.add_argument("--gzip", action="store_true", help="compress the trace")
    _add_engine_arguments(parser)


def _add_save_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a new folder on the engine's host, absolute")
    parser.add_argument("--pattern", metavar="NAME", help="of the files, with {part} (model-rank-0-part-N.safetensors)")
    parser.add_argument("--max-size", type=int, metavar="BYTES", help="most tensors in a file (default: one file)")
    _add_engine_arguments(parser)


def _add_reload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", help="of the same model, absolute on every engine's host (default: that of each, again)"
    )
    parser.add_argument("--version", default="", metavar="NAME", help="name of the weights (a digest of them)")
    parser.add_argument(
        "--mode",
        choices=RELOAD_MODES,
        default="wait",
        help="running requests: let them end; requeue to resume after the last token; or abort them (wait)",
    )
    parser.add_argument("--drain-timeout", type=float, default=30.0, metavar="S", help="for --mode wait (30)")
    parser.add_argument("--check", action="store_true", help="only check whether every engine could do it")
    _add_engine_arguments(parser)
    parser.set_defaults(timeout=RELOAD_TIMEOUT_S)


def _add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("size", type=int, help="ranks; at most as many as it has engines, those that stand by included")
    parser.add_argument("--group", metavar="NAME", help="as worker list shows it; may be left out while there is one")
    _add_engine_arguments(parser)
    parser.set_defaults(timeout=SCALE_TIMEOUT_S)


def _add_rpc_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", help="a registered method, such as device_info")
    parser.add_argument("--args", default="[]", metavar="JSON", help="its arguments, as a JSON array")
    parser.add_argument("--kwargs", default="{}", metavar="JSON", help="its keyword arguments, as a JSON object")
    _add_engine_arguments(parser)


def _command(ask: Ask, describe: Callable[[Any], str]) -> Callable[[argparse.Namespace], int]:
    """Return a command's ``run``, which calls ``ask`` and prints each engine's reply, even if other engines failed."""

    async def ask_at(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
        async with Client.connect(url, namespace=arguments.namespace, shards=arguments.shards) as client:
            options = CallOptions(engine_id=arguments.engine, model=arguments.model, timeout_s=arguments.timeout)
            return await ask(client, arguments, options)

    def show(answers: dict[str, Any], arguments: argparse.Namespace) -> None:
        if arguments.json:
            print_json(answers)
        elif answers:
            print(format_table(("ENGINE", "ANSWER"), [(name, describe(answers[name])) for name in sorted(answers)]))

    def run(arguments: argparse.Namespace) -> int:
        with resolve_redis_url(arguments.redis_url) as url:
            try:
                answers = asyncio.run(ask_at(url, arguments))
            except EngineCallError as error:
                show(error.answers, arguments)
                raise
        show(answers, arguments)
        return 0

    return run


def _describe_sleep(state: SleepState) -> str:
    if not state.is_sleeping:
        return "awake"
    return f"asleep (level {state.level}: {', '.join(state.tags)}{', unloaded' if state.is_unloaded else ''})"


def _describe_reset(success: bool) -> str:
    return "forgotten" if success else "in use, nothing is done"


def _describe_saved(saved: ShardedStateSaved) -> str:
    return f"{format_bytes(saved.num_bytes)} in {len(saved.files)} files in {saved.path}"


def _describe_reloaded(reloaded: WeightsReloaded) -> str:
    change = f"{reloaded.former_version or 'unknown'} -> {reloaded.version} of {reloaded.path}"
    return f"{change} in {reloaded.load_time_s:.1f} s" if reloaded.load_time_s else f"could change: {change}"


def _describe_rank(rank: GroupStatus) -> str:
    return f"serves in generation {rank.generation}"


def _describe_time(time_s: float) -> str:
    return f"{time_s * 1000:.1f} ms"


def _describe_result(result: Any) -> str:
    return msgspec.json.encode(result).decode()


def _json_argument(option: str, text: str, kind: type[Any]) -> Any:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise UsageError(f"{option} is no JSON: {error}") from None
    if not isinstance(value, kind):
        raise UsageError(f"{option} must be a JSON {'array' if kind is list else 'object'}, got {text}")
    return value


async def _put_to_sleep(client: Client, arguments: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    return await client.sleep(arguments.level, mode=arguments.mode, drain_timeout_s=arguments.drain_timeout, **options)


async def _wake_up(client: Client, arguments: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    return await client.wake_up(arguments.tag, **options)


async def _status(client: Client, _: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    return await client.sleep_state(**options)


async def _reset(client: Client, _: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    return await client.reset_prefix_cache(**options)


async def _start_profile(client: Client, arguments: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    form = {"prefix": arguments.prefix, "with_stack": arguments.with_stack, "use_gzip": arguments.gzip}
    return await client.start_profile(**form, **options)


async def _stop_profile(client: Client, _: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    return await client.stop_profile(**options)


async def _save(client: Client, arguments: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    return await client.save_sharded_state(arguments.path, arguments.pattern, arguments.max_size, **options)


async def _reload(client: Client, arguments: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    return await client.reload_weights(
        arguments.folder,
        version=arguments.version,
        mode=arguments.mode,
        drain_timeout_s=arguments.drain_timeout,
        only_check=arguments.check,
        **options,
    )


async def _rpc(client: Client, arguments: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    args = _json_argument("--args", arguments.args, list)
    kwargs = _json_argument("--kwargs", arguments.kwargs, dict)
    return await client.collective_rpc(arguments.method, args, kwargs, **options)


async def _scale_engines(client: Client, arguments: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    ranks = await client.scale_elastic_ep(
        arguments.size, arguments.timeout, model=options.get("model"), group=arguments.group
    )
    return {f"{rank.group} {rank.rank}/{rank.size}": rank for rank in ranks}


async def _dummy_batch(client: Client, _: argparse.Namespace, options: CallOptions) -> dict[str, Any]:
    return await client.execute_dummy_batch(**options)


def _leaf(
    name: str,
    summary: str,
    ask: Ask,
    describe: Callable[[Any], str],
    add_arguments: Callable[[argparse.ArgumentParser], None] = _add_engine_arguments,
) -> Command:
    return Command(name, summary, run=_command(ask, describe), add_arguments=add_arguments)


COMMAND = Command(
    "engine",
    "Put engines to sleep, wake, profile and inspect them.",
    subcommands=(
        _leaf("status", "Show which engines sleep.", _status, _describe_sleep),
        _leaf("sleep", "Release memory and claim no requests.", _put_to_sleep, _describe_sleep, _add_sleep_arguments),
        _leaf("wake-up", "Allocate memory again and serve.", _wake_up, _describe_sleep, _add_wake_up_arguments),
        _leaf("reset-prefix-cache", "Drop the cached blocks of earlier prompts.", _reset, _describe_reset),
        Command(
            "profile",
            "Record what torch does in the engines' steps.",
            subcommands=(
                _leaf(
                    "start",
                    "Begin; says in which folder the trace will be.",
                    _start_profile,
                    str,
                    _add_profile_arguments,
                ),
                _leaf("stop", "Write the trace and say to which file.", _stop_profile, str),
            ),
        ),
        _leaf("save", "Write the weights in memory into a new folder.", _save, _describe_saved, _add_save_arguments),
        _leaf(
            "reload-weights",
            "Serve the weights of another folder, one engine after the other.",
            _reload,
            _describe_reloaded,
            _add_reload_arguments,
        ),
        _leaf("rpc", "Run a registered method.", _rpc, _describe_result, _add_rpc_arguments),
        _leaf(
            "scale",
            "Give a data-parallel group more or fewer ranks.",
            _scale_engines,
            _describe_rank,
            _add_scale_arguments,
        ),
        _leaf("dummy-batch", "Run one token that belongs to no request.", _dummy_batch, _describe_time),
    ),
)
