"""`penstock chaos`: the same requests undisturbed and under fire, compared one by one."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from ....producer import Client, Delta
from ....shared.connection import CommandConnection
from ....shared.errors import PenstockError
from ....shared.keys import Keys
from ....shared.partitions import change_partitions
from ....shared.shards import choose_shard, make_commands
from ....shared.values.names import partition_name
from ...demo.run import MODEL
from ...local.stack import LocalStack
from ...statistics import percentile
from ..bench.report import machine, versions
from ..clusters.sentinel_trio import SentinelTrio
from .disturber import Disturber
from .killed_reader import KilledReaders
from .ledger_load import LedgerLoad
from .ledger_records import LedgerCheck, check_ledger, joined_checks, shown_sums
from .load import LoadResult, OnDelta, run_load
from .options import ChaosOptions
from .owner_watch import OwnerWatch
from .owners import Owners
from .pace import EveryFewSeconds, EveryFewTokens
from .recovery_clock import RecoveryClock
from .several_models import SwapFigures, SwapWatch, choose_models, sharing_options
from .timelines import Timelines, read_timelines
from .verdict import Verdict, judge
from .workload import ChaosRequest, make_requests

MODEL_NAME = "demo"
MAX_DELIVERIES = 10
# Longer than a lease. So an engine paused for less continues while others own its requests; its writes are refused.
# The worker process of a real model reads a large vocabulary for seconds, on a busy machine for more than ten.
STALL_TIMEOUT_S, STALL_TIMEOUT_OF_OTHERS_S = 6.0, 30.0
# A request that takes this much longer than everything else is lost. It only guards against hanging: on a busy machine
# a reader's process may need a minute to start, and an engine with a real model several.
PATIENCE_S = 900.0
TENANTS_PER_PARTITION = 4


class ChaosReport(msgspec.Struct, kw_only=True):
    """Contents of the JSON file."""

    machine: dict[str, str]
    versions: dict[str, str]
    options: ChaosOptions
    verdict: Verdict
    events: dict[str, int]
    ledger: LedgerCheck
    other_ends: dict[str, int]
    undisturbed_tokens_per_s: float
    disturbed_tokens_per_s: float
    recoveries_s: list[float]
    swaps: SwapFigures | None = None


def run_chaos(options: ChaosOptions) -> int:
    """Run both, print the table, and return 1 if any request was harmed, or nothing was killed."""
    console = Console()
    console.print(f"seed {options.seed}; starting Redis and {options.num_engines} engines …")
    with _running_stack(options) as (stack, trio, models):
        report = asyncio.run(_run_under_chaos(stack, options, console, trio, models))
    _print(console, report)
    if options.json_path:
        json_path = Path(options.json_path)
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
        console.print(f"written to {options.json_path}")
    return 0 if report.verdict.is_clean else 1


@contextmanager
def _running_stack(options: ChaosOptions) -> Iterator[tuple[LocalStack, SentinelTrio | None, list[str]]]:
    """Run Redis and the engines for the time of a ``with`` block. Yields them and the names of the models."""
    worker_options = [*options.device_arguments, "--dtype", options.dtype, "--max-num-seqs", "32"]
    stall_timeout_s = STALL_TIMEOUT_OF_OTHERS_S if options.models else STALL_TIMEOUT_S
    worker_options += ["--drain-timeout", "1", "--stall-timeout", str(stall_timeout_s), *options.engine_arguments]
    # Kills at random, every other second, are no request's fault: three in a row before its first token can happen.
    worker_options += ["--max-deliveries", str(MAX_DELIVERIES)]
    log_path = Path(options.log_path) if options.log_path else None
    shards = [f"shard{number}" for number in range(options.num_shards)]
    with _trio(options) as trio, tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        if options.num_models > 1:
            paths = choose_models(Path(folder), options)
            first, models = paths[0], [path.name for path in paths]
            of_each = [sharing_options(options, paths)] * options.num_engines
        else:
            first, models = Path(MODEL), _models(shards)
            # Engines serve the models in turn.
            names = [models[number % len(models)] for number in range(options.num_engines)]
            of_each = [["--served-model-name", name] for name in names]
        url = trio.url if trio else ""
        with LocalStack(first, worker_options, log_path, redis_url=url, shards=shards, of_each=of_each) as stack:
            yield stack, trio, models


@contextmanager
def _trio(options: ChaosOptions) -> Iterator[SentinelTrio | None]:
    if not options.has_sentinels:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, SentinelTrio(Path(folder)) as trio:
        yield trio


def _models(shards: list[str]) -> list[str]:
    """Return a model name for each shard."""
    names = (f"demo{number}" for number in itertools.count())
    return [next(name for name in names if choose_shard(name, shards) == shard) for shard in shards] or [MODEL_NAME]


async def _run_under_chaos(
    stack: LocalStack, options: ChaosOptions, console: Console, trio: SentinelTrio | None, models: list[str]
) -> ChaosReport:
    tenants = [f"tenant{number}" for number in range(TENANTS_PER_PARTITION * options.num_partitions)]
    requests = make_requests(options.num_requests, options.seed, models, tenants)
    console.print(f"{len(requests)} requests undisturbed …")
    async with AsyncExitStack() as watching:
        watch = await watching.enter_async_context(_watching_swaps(stack, models)) if options.num_models > 1 else None
        undisturbed = await _undisturbed(stack, requests, options, watch)
        console.print(f"… {undisturbed.tokens_per_s:,.0f} tokens/s; the same under fire …")
        clock, tokens = RecoveryClock(), EveryFewTokens(options.interval_tokens)
        disturber = _make_disturber(stack, options, tokens, clock, trio, watch)

        def on_delta(request: ChaosRequest, request_id: str, delta: Delta) -> None:
            clock.saw(request_id)
            tokens.saw(len(delta.token_ids))
            if watch is not None and request.model is not None:
                watch.served(request.model)

        owners = [
            await watching.enter_async_context(_watching(url, partition_name(model, partition)))
            for url in stack.server_urls.values()
            for model in models
            for partition in range(options.num_partitions)
        ]
        growing = asyncio.create_task(_partition(stack, models, options.num_partitions))
        disturbed, other_ends = await _under_fire(stack, requests, options, disturber, on_delta, models, watch)
        await growing
        ledger = await _check_ledger(stack, models, options.num_partitions)
        swaps = watch.figures() if watch is not None else None
    # A replica that takes over may lack the last writes.
    may_lose = options.loses_data or options.has_sentinels
    verdict = judge(
        undisturbed.sightings[: len(requests)],
        disturbed.sightings,
        Owners.joined(owners),
        num_kills=disturber.num_kills,
        missing=disturber.missing,
        loses_data=may_lose,
        timelines=None if may_lose else await _read_timelines(stack, models),
        ledger=ledger,
        num_unserved=len(swaps.unserved) if swaps is not None else 0,
        may_differ=[not (options.is_deterministic or request.params.greedy) for request in requests],
    )
    return ChaosReport(
        machine=machine(),
        versions=versions(),
        options=options,
        verdict=verdict,
        events=dict(disturber.events),
        ledger=ledger,
        other_ends=dict(other_ends),
        undisturbed_tokens_per_s=undisturbed.tokens_per_s,
        disturbed_tokens_per_s=disturbed.tokens_per_s,
        recoveries_s=clock.recoveries_s,
        swaps=swaps,
    )


def _make_disturber(
    stack: LocalStack,
    options: ChaosOptions,
    tokens: EveryFewTokens,
    clock: RecoveryClock,
    trio: SentinelTrio | None,
    watch: SwapWatch | None,
) -> Disturber:
    return Disturber(
        stack,
        options.seed,
        tokens if options.interval_tokens else EveryFewSeconds(options.interval_s),
        clock,
        trio,
        loses_data=options.loses_data,
        has_ranks=options.num_ranks > 1,
        watch=watch,
    )


async def _read_timelines(stack: LocalStack, models: list[str]) -> Timelines:
    async with Client.connect(stack.url, shards=stack.shards or {}) as client:
        return await read_timelines(client, models)


@asynccontextmanager
async def _watching_swaps(stack: LocalStack, models: list[str]) -> AsyncIterator[SwapWatch]:
    watch = SwapWatch(stack, models)
    watching = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _undisturbed(
    stack: LocalStack, requests: list[ChaosRequest], options: ChaosOptions, watch: SwapWatch | None
) -> LoadResult:
    """Run each request once, or until ``min_swaps`` swaps have happened, without faults."""

    def go_on(num_started: int) -> bool:
        return num_started < len(requests) or (watch is not None and watch.num_swaps < options.min_swaps)

    if watch is not None:
        watch.measures_memory = True
    result = await _load_stack(stack, requests, options, "calm", lambda *_: None, go_on)
    if watch is not None:
        watch.measures_memory = False
    return result


async def _partition(stack: LocalStack, models: list[str], num: int) -> None:
    """Change the partitions of the models under load, retrying after interruptions."""
    commands = make_commands(stack.url, stack.shards, Keys())
    try:
        for model in models if num > 1 else ():
            is_done = False
            while not is_done:
                with suppress(PenstockError, RedisError):
                    is_done = bool(await change_partitions(commands, Keys(), model, num))
    finally:
        await commands.close()


async def _under_fire(
    stack: LocalStack,
    requests: list[ChaosRequest],
    options: ChaosOptions,
    disturber: Disturber,
    on_delta: OnDelta,
    models: list[str],
    watch: SwapWatch | None,
) -> tuple[LoadResult, Mapping[str, int]]:
    """Run the load while the disturber injects faults. All workers serve again when this returns.

    Returns the result of the load, and the ends of the requests that end in other ways, by kind.
    """
    disturbing = asyncio.create_task(disturber.run())
    until = time.monotonic() + options.min_seconds
    connect = partial(Client.connect, stack.url, shards=stack.shards or {})

    def go_on(num_started: int) -> bool:
        is_short = time.monotonic() < until or not disturber.has_shown(options.min_events)
        if num_started < len(requests) or is_short:
            return not disturbing.done()
        _cancel_once(disturbing)
        # Until each model has been served after the last fault.
        return watch is not None and not watch.is_settled

    is_loading = True
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        readers = KilledReaders(stack.url, stack.shards or {})
        others = LedgerLoad(connect, stack.url, Path(folder), models, options.seed)
        ending = asyncio.create_task(others.run_while(lambda: is_loading))
        try:
            result = await _load_stack(stack, requests, options, "chaos", on_delta, go_on, readers)
        finally:
            is_loading = False
            _cancel_once(disturbing)
            with suppress(asyncio.CancelledError):
                await disturbing
            await disturber.settle()
            async with asyncio.timeout(PATIENCE_S):
                await ending
    # Not "kill …": such events count as kills of what serves.
    disturber.events["reader killed"] += readers.num_killed
    return result, others.ends


def _cancel_once(task: asyncio.Task[None]) -> None:
    """Cancel a task, which may complete an action first. A second cancellation would cut that short."""
    if not task.cancelling():
        task.cancel()


async def _check_ledger(stack: LocalStack, models: list[str], num_partitions: int) -> LedgerCheck:
    """Compare the ledgers of all models with the records, when all requests have ended."""
    commands = make_commands(stack.url, stack.shards, Keys())
    try:
        async with asyncio.timeout(PATIENCE_S):
            checks = [await check_ledger(commands, Keys(), model, num_partitions) for model in models]
            while any(check.num_live for check in checks):
                await asyncio.sleep(1.0)
                checks = [await check_ledger(commands, Keys(), model, num_partitions) for model in models]
        return joined_checks(checks)
    finally:
        await commands.close()


@asynccontextmanager
async def _watching(url: str, model: str) -> AsyncIterator[Owners]:
    """Observe the writes of a model at a server, from before the load until all its commands were observed."""
    owners = Owners()
    watch, commands = OwnerWatch(url, Keys().model(model), owners), CommandConnection(url)
    watching = asyncio.create_task(watch.run())
    try:
        await watch.catch_up(commands)
        yield owners
        await watch.catch_up(commands)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await commands.close()


async def _load_stack(
    stack: LocalStack,
    requests: list[ChaosRequest],
    options: ChaosOptions,
    label: str,
    on_delta: OnDelta,
    go_on: Callable[[int], bool],
    readers: KilledReaders | None = None,
) -> LoadResult:
    return await run_load(
        stack.url,
        requests,
        label=label,
        concurrency=options.concurrency,
        on_delta=on_delta,
        go_on=go_on,
        patience_s=PATIENCE_S,
        shards=stack.shards,
        readers=readers,
    )


def _print(console: Console, report: ChaosReport) -> None:
    verdict = report.verdict
    console.print(", ".join(f"{count} x {name}" for name, count in sorted(report.events.items())) or "nothing happened")
    table = Table(title=f"{verdict.num_requests} requests under fire, seed {report.options.seed}")
    harms = {
        "lost": verdict.lost,
        "duplicated": verdict.duplicated,
        "reordered": verdict.reordered,
        "different": verdict.different,
        "ends ≠ 1": verdict.wrong_ends,
        "failed": verdict.failed,
        "two owners": verdict.two_owners,
        "wrong events": verdict.wrong_timelines,
        "ledger ≠ records": verdict.wrong_ledger,
        "unserved": verdict.unserved,
    }
    for column in harms:
        table.add_column(column, justify="right")
    table.add_row(*map(str, harms.values()))
    console.print(table)
    console.print(f"{verdict.num_records} records were seen being written; {verdict.num_moved} requests changed owner")
    if verdict.num_compared < verdict.num_requests:
        console.print(f"{verdict.num_compared} of the requests are greedy, and were compared token by token")
    console.print(f"the events of {verdict.num_timelines} requests were held against what was seen")
    console.print(f"the ledger of {report.ledger.num_requests} requests: {shown_sums(report.ledger.ledger)}")
    if report.swaps is not None:
        _print_swaps(console, report.swaps)
    if verdict.shows_nothing:
        console.print(
            f"{verdict.shows_nothing}, so this shows nothing: go on for longer (--seconds, --events)", style="red"
        )
    if verdict.num_gone:
        console.print(f"{verdict.num_gone} requests ended with the error that says that Redis has lost them")
    if verdict.num_sent_again:
        console.print(f"{verdict.num_sent_again} times a request was lost before its first token, and sent again")
    for example in verdict.examples:
        console.print(example, style="red")
    times = report.recoveries_s
    if times:
        console.print(
            f"from the death of its engine to a request's next token ({len(times)} times): "
            f"p50 {percentile(times, 0.5):.2f} s, p99 {percentile(times, 0.99):.2f} s, max {max(times):.2f} s"
        )
    share = report.disturbed_tokens_per_s / report.undisturbed_tokens_per_s
    console.print(
        f"tokens/s: {report.undisturbed_tokens_per_s:,.0f} undisturbed, "
        f"{report.disturbed_tokens_per_s:,.0f} under fire ({share:.0%})"
    )


def _print_swaps(console: Console, swaps: SwapFigures) -> None:
    times = ", ".join(f"{name} {'never' if s is None else f'{s:.1f} s'}" for name, s in swaps.served_after_s.items())
    console.print(
        f"{swaps.num_swaps} swaps took {swaps.share:.1%} of the time; most models awake at once: {swaps.most_awake}"
    )
    console.print(f"served after the last fault (bound {swaps.bound_s:.1f} s): {times or 'no fault happened'}")
    if swaps.early_bytes:
        growth = swaps.late_bytes / swaps.early_bytes - 1
        console.print(
            f"memory after 10 swaps and at the last ones of the undisturbed run: {swaps.early_bytes / 2**20:.0f} and "
            f"{swaps.late_bytes / 2**20:.0f} MiB ({growth:+.1%})"
        )
