"""``penstock requests``: list requests, show the timeline of one, cancel or retry many."""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable, Set

from ....shared.broker import STATE_WORDS, RequestFilter
from ....shared.broker.bulk import count_matching
from ....shared.errors import RequestNotFoundError
from ....shared.partitions import open_history
from ....shared.process.command_line import EXIT_FAILED, Command, UsageError, add_redis_arguments, format_table
from ....shared.queue.lifecycle import LIVE_STATES, RETRYABLE_STATES, RequestEvent, RequestState, RequestSummary
from ...words import event_words, format_duration, format_sheet, format_time, parse_span
from ..command_parts import OpenModel, confirmed, on_model, print_json, run_on_model

_HEADER = ("REQUEST", "STATE", "TENANT", "BAND", "LAST MOVE", "TOKENS", "TRIES", "WAITED", "TOOK", "ENGINE", "CAUSE")
_TIMELINE_HEADER = ("AT", "AFTER", "WHAT", "TOKENS", "ENGINE", "EPOCH", "WHY")
_MAX_CAUSE_CHARS = 60


def _add_filter_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="may be left out if only one is known, or served")
    parser.add_argument(
        "--state", action="append", default=[], help=f"may be given several times: {', '.join(STATE_WORDS)}"
    )
    parser.add_argument("--tenant", default="", help="only of this tenant")
    parser.add_argument("--band", default="", help="only of this band")
    parser.add_argument("--engine", default="", metavar="ID", help="only requests that this engine runs, or ran last")
    parser.add_argument("--id-prefix", default="", metavar="TEXT", help="only ids with this prefix")
    parser.add_argument(
        "--since", metavar="TIME", help="only those that changed since: an age, 15m, or a time of UTC, 2026-11-29T14:05"
    )
    parser.add_argument("--until", metavar="TIME", help="only requests that have not changed after it (now)")
    add_redis_arguments(parser)


def _add_request_list_arguments(parser: argparse.ArgumentParser) -> None:
    _add_filter_arguments(parser)
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="maximum number to show (default: 100)")
    parser.add_argument("--json", action="store_true", help="one array of requests, with every field")


def _add_timeline_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="ID")
    parser.add_argument("--model", help="may be left out if only one is known, or served")
    add_redis_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one object: the request and its events")


def _add_change_arguments(parser: argparse.ArgumentParser) -> None:
    _add_filter_arguments(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _filter(arguments: argparse.Namespace) -> RequestFilter:
    return RequestFilter(
        states=tuple(arguments.state),
        tenant=arguments.tenant,
        band=arguments.band,
        engine_id=arguments.engine,
        id_prefix=arguments.id_prefix,
        **parse_span(vars(arguments), time.time()),
    )


async def _list_requests(model: OpenModel, arguments: argparse.Namespace) -> None:
    history = await open_history(model.connection, model.keys, model.name)
    matching = await history.requests(_filter(arguments), limit=arguments.limit)
    if arguments.json:
        print_json(matching)
    elif matching:
        print(format_table(_HEADER, [_request_row(request) for request in matching]))
    else:
        print("no such requests")


async def _show_timeline(model: OpenModel, arguments: argparse.Namespace) -> None:
    history = await open_history(model.connection, model.keys, model.name)
    request = await history.find(arguments.request_id)
    if request is None:
        raise RequestNotFoundError(
            f"model {model.name!r} has no request {arguments.request_id!r}, and none of its events is stored any more"
        )
    events = await history.history(arguments.request_id)
    if arguments.json:
        print_json({"request": request, "events": events})
        return
    print(_sheet(request))
    if events:
        rows = [_event_row(event, events[0].at) for event in events]
        print("\n" + format_table(_TIMELINE_HEADER, rows))


def _count_requests(states: Set[RequestState]) -> Callable[[OpenModel, argparse.Namespace], Awaitable[int]]:
    async def count(model: OpenModel, arguments: argparse.Namespace) -> int:
        history = await open_history(model.connection, model.keys, model.name)
        return await count_matching(history, _filter(arguments), states)

    return count


async def _cancel_requests(model: OpenModel, arguments: argparse.Namespace) -> int:
    return await model.operations.cancel_matching(model.name, _filter(arguments))


async def _retry_requests(model: OpenModel, arguments: argparse.Namespace) -> int:
    return await model.operations.retry_matching(model.name, _filter(arguments))


def _run_cancel(arguments: argparse.Namespace) -> int:
    num_cancelled = _change_many(arguments, LIVE_STATES, "cancel {} requests?", _cancel_requests)
    print("nothing is cancelled" if num_cancelled is None else f"{num_cancelled} cancelled")
    return EXIT_FAILED if num_cancelled is None else 0


def _run_retry(arguments: argparse.Namespace) -> int:
    question = "queue {} requests again, from their prompts?"
    num_retried = _change_many(arguments, RETRYABLE_STATES, question, _retry_requests)
    if num_retried is None:
        print("nothing is queued")
        return EXIT_FAILED
    print(f"{num_retried} queued again; the input of others is not stored")
    return 0


def _change_many(
    arguments: argparse.Namespace,
    states: Set[RequestState],
    question: str,
    change: Callable[[OpenModel, argparse.Namespace], Awaitable[int]],
) -> int | None:
    """Change the requests in these states that match, after a question with their number.

    Returns their number; None if the user refuses.
    """
    if _filter(arguments) == RequestFilter():
        names = "--state, --tenant, --band, --engine, --id-prefix, --since or --until"
        raise UsageError(f"the filter is empty; pass {names}")
    num_matching = run_on_model(_count_requests(states), arguments)
    if num_matching and not confirmed(question.format(num_matching), arguments):
        return None
    return run_on_model(change, arguments) if num_matching else 0


def _request_row(request: RequestSummary) -> tuple[str, ...]:
    return (
        request.request_id,
        request.state,
        request.tenant,
        request.band,
        format_time(request.at),
        str(request.num_output_tokens),
        str(request.num_attempts),
        _between(request.arrived_at, request.started_at),
        _between(request.started_at, request.ended_at),
        request.engine_id or "-",
        _shortened(request.cause) or "-",
    )


def _sheet(request: RequestSummary) -> str:
    return format_sheet(
        {
            "request": request.request_id,
            "state": f"{request.state}, {request.cause}" if request.cause else request.state,
            "tenant": f"{request.tenant}, band {request.band}",
            "arrived": "-" if request.arrived_at is None else format_time(request.arrived_at),
            "waited": _between(request.arrived_at, request.started_at),
            "took": _between(request.started_at, request.ended_at),
            "tokens": f"{request.num_output_tokens} of at most {request.max_tokens or '?'}, "
            f"prompt {request.num_prompt_tokens or '?'}",
            "engine": f"{request.engine_id or '-'}, try {request.num_attempts}",
        }
    )


def _event_row(event: RequestEvent, began_at: float) -> tuple[str, ...]:
    return (
        format_time(event.at),
        f"+{event.at - began_at:.3f} s",
        event_words(event.kind),
        str(event.num_output_tokens),
        event.engine_id or "-",
        str(event.epoch or "-"),
        event.cause or "-",
    )


def _between(start: float | None, end: float | None) -> str:
    return "-" if start is None or end is None else format_duration(max(0.0, end - start))


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CAUSE_CHARS else text[: _MAX_CAUSE_CHARS - 1] + "…"


COMMAND = Command(
    "requests",
    "List requests, show the timeline of one, cancel or retry many.",
    subcommands=(
        Command(
            "list",
            "Show requests, last changed first, also those with expired results.",
            run=on_model(_list_requests),
            add_arguments=_add_request_list_arguments,
        ),
        Command(
            "show", "Show one and its timeline.", run=on_model(_show_timeline), add_arguments=_add_timeline_arguments
        ),
        Command(
            "cancel",
            "Cancel the requests that match a filter, after showing their number.",
            run=_run_cancel,
            add_arguments=_add_change_arguments,
        ),
        Command(
            "retry",
            "Queue failed, cancelled and expired requests that match a filter again, after showing their number.",
            run=_run_retry,
            add_arguments=_add_change_arguments,
        ),
    ),
)
