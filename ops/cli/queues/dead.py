"""``penstock dead``: requests that killed their engines or that no engine could read; replay or purge them."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from ....shared.broker import DeadLetter
from ....shared.deployment.records import DeadRequest
from ....shared.errors import PenstockError, RequestNotFoundError, ValidationError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.partitions import open_dead_letter
from ....shared.process.command_line import EXIT_FAILED, Command, UsageError, add_redis_arguments, format_table
from ...words import format_time
from ..command_parts import OpenModel, confirmed, on_model, print_json, run_on_model

_HEADER = ("REQUEST", "PARKED", "DELIVERIES", "TOKENS", "ENGINE", "CAUSE")
_MAX_CAUSE_CHARS = 60
_MAX_PROMPT_CHARS = 400
_MAX_PROMPT_TOKENS = 64

Work = Callable[[OpenModel, argparse.Namespace], Awaitable[None]]

_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)


def _add_dead_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="may be left out if only one is known, or served")
    add_redis_arguments(parser)


def _add_dead_list_arguments(parser: argparse.ArgumentParser) -> None:
    _add_dead_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one array of parked requests, with every field")


def _add_dead_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="ID")
    _add_dead_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one object with every field")


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="ID", nargs="?")
    parser.add_argument("--all", action="store_true", help="every parked request of the model")
    parser.add_argument("--yes", action="store_true", help="with --all, do not ask")
    _add_dead_arguments(parser)


def _add_purge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="ID", nargs="?")
    parser.add_argument("--all", action="store_true", help="every parked request of the model")
    parser.add_argument("--yes", action="store_true", help="with --all, do not ask")
    _add_dead_arguments(parser)


async def _list_parked(model: OpenModel, arguments: argparse.Namespace) -> None:
    parked = await (await _letter(model)).list()
    if arguments.json:
        print_json([_parked_fields(request) for request in parked])
    elif parked:
        print(format_table(_HEADER, [_parked_row(request) for request in parked]))
    else:
        print("nothing is parked")


async def _show_parked(model: OpenModel, arguments: argparse.Namespace) -> None:
    parked = await _found(await _letter(model), arguments.request_id)
    if arguments.json:
        print_json(_parked_fields(parked))
    else:
        print(_sheet(parked))


async def _replay_parked(model: OpenModel, arguments: argparse.Namespace) -> None:
    if arguments.all:
        print(f"{await model.operations.replay_all_dead(model.name)} queued again")
        return
    parked = await _found(await _letter(model), arguments.request_id)
    if not parked.is_request:
        raise ValidationError(
            f"{parked.request_id!r} is an entry of a foreign writer in the lane, not a request, so it cannot be "
            "replayed; remove it with 'penstock dead purge'"
        )
    if not await model.operations.replay_dead(model.name, parked.request_id):
        raise _not_parked(parked.request_id)
    print(
        f"{parked.request_id} is queued again and restarts from its prompt; no caller waits for it, but its result can "
        "be read by its id"
    )


async def _purge_parked(model: OpenModel, arguments: argparse.Namespace) -> None:
    if not arguments.all:
        if not await model.operations.purge_dead(model.name, arguments.request_id):
            raise _not_parked(arguments.request_id)
        print(f"{arguments.request_id} is purged")
        return
    print(f"{await model.operations.purge_all_dead(model.name)} purged")


async def _letter(model: OpenModel) -> DeadLetter:
    return await open_dead_letter(model.connection, model.keys, model.name)


def _for_one_or_all(work: Work, question: str) -> Callable[[argparse.Namespace], int]:
    """Return the ``run`` of a command that takes an ID or --all, and asks before it runs ``work`` on all."""

    async def count(model: OpenModel, _: argparse.Namespace) -> int:
        return await (await _letter(model)).count()

    def run(arguments: argparse.Namespace) -> int:
        if arguments.all == (arguments.request_id is not None):
            raise UsageError("give either an ID or --all, which means every parked request of the model")
        if arguments.all and not arguments.yes:
            num_parked = run_on_model(count, arguments)
            if num_parked and not confirmed(question.format(num_parked), arguments):
                print("nothing is done")
                return EXIT_FAILED
        return on_model(work)(arguments)

    return run


async def _found(letter: DeadLetter, request_id: str) -> DeadRequest:
    parked = await letter.show(request_id)
    if parked is None:
        raise _not_parked(request_id)
    return parked


def _not_parked(request_id: str) -> RequestNotFoundError:
    return RequestNotFoundError(
        f"no request {request_id!r} is parked for this model; 'penstock dead list' shows those that are"
    )


def _decoded(parked: DeadRequest) -> EngineCoreRequest | None:
    """Return the decoded request; None if the bytes are not a valid request."""
    if not parked.is_request:
        return None
    try:
        return _decoder.decode(parked.payload)
    except (msgspec.MsgspecError, PenstockError, UnicodeDecodeError):
        return None


def _parked_row(parked: DeadRequest) -> tuple[str, ...]:
    cause = parked.cause
    return (
        parked.request_id,
        format_time(parked.parked_at),
        str(parked.deliveries),
        str(parked.num_output_tokens),
        "-" if cause is None else cause.engine_id,
        _shortened(_reason(parked).splitlines()[0], _MAX_CAUSE_CHARS),
    )


def _sheet(parked: DeadRequest) -> str:
    """Return all data about a parked request as text."""
    cause, request = parked.cause, _decoded(parked)
    lines = {
        "request": parked.request_id,
        "parked": format_time(parked.parked_at),
        "cause": _reason(parked),
        "engine": "-" if cause is None else cause.engine_id,
        "last step": "-" if cause is None else cause.last_step,
        "deliveries": f"{parked.deliveries}, of which {parked.deaths} in a row ended with the death of the engine",
        "tokens": f"{parked.num_output_tokens} of output before its last death",
        "input hash": parked.input_hash or "-",
    }
    if request is None:
        lines["payload"] = f"{len(parked.payload)} bytes: {_shortened(repr(parked.payload), _MAX_PROMPT_CHARS)}"
    else:
        lines["model"] = f"{request.model}, tenant {request.tenant}, priority {request.priority}"
        lines["parameters"] = _parameters(request)
        lines["prompt"] = _prompt(request)
    if parked.is_request:
        lines["replay"] = f"penstock dead replay {parked.request_id}"
    else:
        lines["replay"] = f"not possible: it is not a request; remove it with penstock dead purge {parked.request_id}"
    text = "\n".join(f"{name + ':':<12}{value}" for name, value in lines.items())
    return f"{text}\ntraceback:\n{cause.trace.rstrip()}" if cause is not None and cause.trace else text


def _reason(parked: DeadRequest) -> str:
    if parked.cause is not None and parked.cause.reason:
        return parked.cause.reason
    return "unknown" if parked.is_request else "an entry of the lane that is not a request"


def _parameters(request: EngineCoreRequest) -> str:
    """Return the parameters that are not at their defaults."""
    params = request.sampling_params or request.pooling_params
    if params is None:
        return "-"
    plain = type(params)()
    changed = [name for name in params.__struct_fields__ if getattr(params, name) != getattr(plain, name)]
    return ", ".join(f"{name}={getattr(params, name)!r}" for name in changed) or "defaults"


def _prompt(request: EngineCoreRequest) -> str:
    if request.prompt_token_ids is not None:
        token_ids = request.prompt_token_ids
        first_ids = ", ".join(map(str, token_ids[:_MAX_PROMPT_TOKENS]))
        return f"{len(token_ids)} token ids: {first_ids}{', …' if len(token_ids) > _MAX_PROMPT_TOKENS else ''}"
    if request.messages is not None:
        return f"{len(request.messages)} messages: {_shortened(repr(request.messages), _MAX_PROMPT_CHARS)}"
    text = request.prompt or ""
    return f"{len(text)} characters: {_shortened(repr(text), _MAX_PROMPT_CHARS)}"


def _parked_fields(parked: DeadRequest) -> dict[str, Any]:
    """Return all fields by name, and the decoded request if it is one."""
    request, cause = _decoded(parked), parked.cause
    fields = msgspec.structs.asdict(parked)
    fields["cause"] = None if cause is None else msgspec.structs.asdict(cause)
    fields["request"] = None
    if request is not None:
        params = request.sampling_params
        fields["request"] = msgspec.structs.asdict(request)
        fields["request"]["sampling_params"] = None if params is None else msgspec.structs.asdict(params)
    return fields


def _shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


COMMAND = Command(
    "dead",
    "Show parked requests, queue them again, or purge them.",
    subcommands=(
        Command(
            "list",
            "Show what is parked, oldest first.",
            run=on_model(_list_parked),
            add_arguments=_add_dead_list_arguments,
        ),
        Command(
            "show",
            "Show one with its cause and input.",
            run=on_model(_show_parked),
            add_arguments=_add_dead_show_arguments,
        ),
        Command(
            "replay",
            "Queue one again, or all, from the start.",
            run=_for_one_or_all(_replay_parked, "queue {} parked requests again?"),
            add_arguments=_add_replay_arguments,
        ),
        Command(
            "purge",
            "Throw one away, or all.",
            run=_for_one_or_all(_purge_parked, "purge {} parked requests?"),
            add_arguments=_add_purge_arguments,
        ),
    ),
)
