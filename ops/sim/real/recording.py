"""``penstock sim record``: records a scenario with real engines on a real Redis, to compare the simulator with it.

Times are from the events of requests in Redis, by its clock. The server's slow log, configured to record all calls,
counts claims, because engines do not count them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import msgspec
import redis.asyncio

from ....producer import Client, SamplingParams
from ....shared.broker import Queue
from ....shared.broker.request_history import RequestHistory
from ....shared.broker.script import SCRIPTS
from ....shared.connection import CommandConnection
from ....shared.errors import ConfigurationError
from ....shared.keys import Keys
from ....shared.queue.lifecycle import EventKind, RequestEvent
from ...local.stack import LocalStack
from ..clients import configure, draw_calls
from ..measures import WINDOW_S, Measures, Note
from ..scenario import MODEL, Engines, Scenario, Tenants
from .outcome import Outcome, outcome_of
from .real_time import check_comparable

FILE_NAME = "recording.json"
STEPS = "steps"
# Seconds between two reads of the server's slow log.
MOST_CALLS = 100_000
LOOK_EVERY_S = 1.0
PAGE = 5000
# Token ids for prompts, above the special tokens of the models' tokenizers.
TOKEN_IDS = range(10, 250)
OnAccepted = Callable[[Client, Note], Awaitable[None]]
# Each output is split into this many pieces of equal duration, to count its tokens in the right windows.
NUM_PIECES = 20


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The scenario of a recording with the KV cache of its engines, and its results."""

    scenario: Scenario
    outcome: Outcome


def read_recording(folder: Path) -> Recording:
    """Read a recording; raise ``ConfigurationError`` if the folder has none."""
    try:
        return msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=Recording)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{folder} has no recording of penstock sim record: {error}") from error


def record(scenario: Scenario, model: Path, folder: Path) -> Recording:
    """Run a scenario on engines with one thread each on this machine, and write the recording into ``folder``.

    Clients request exactly the tokens of each output, since a real model does not end at a given length by itself.

    Raises:
        ConfigurationError: the scenario cannot be recorded, ``folder`` is not empty, or the engines did not start.
    """
    check_comparable(scenario)
    if len(scenario.engines) > 1:
        raise ConfigurationError("only engines of one kind can be recorded; leave one table [[engines]]")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not empty; pass an empty folder for the recording")
    tenants = [msgspec.structs.replace(group, knows_length=True) for group in scenario.tenants]
    scenario = msgspec.structs.replace(scenario, tenants=tenants)
    kind = scenario.engines[0]
    with LocalStack(model, [*engine_options(kind), "--step-log", str(folder.absolute() / STEPS)]) as stack:
        measures, kv_tokens = asyncio.run(run_on_engines(stack.url, MODEL, scenario))
    scenario = msgspec.structs.replace(scenario, engines=[msgspec.structs.replace(kind, kv_tokens=kv_tokens)])
    recording = Recording(scenario=scenario, outcome=outcome_of(scenario, measures))
    (folder / FILE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(recording)))
    return recording


def engine_options(kind: Engines) -> list[str]:
    """Return the options of `worker start` for the engines of a scenario, with one thread each."""
    options = ["--served-model-name", MODEL, "--device", "cpu", "--threads", "1", "--engines", str(kind.number)]
    options += ["--max-num-seqs", str(kind.max_num_seqs), "--max-num-batched-tokens", str(kind.max_step_tokens)]
    return [*options, "--log-level", "error"]


async def run_on_engines(
    url: str, model: str, scenario: Scenario, on_accepted: OnAccepted | None = None
) -> tuple[Measures, int]:
    """Run a scenario on the idle engines of a deployment.

    Return the measurements, and the size of an engine's cache in tokens. ``on_accepted`` is awaited after each request
    that the queue accepts.

    Raises:
        ConfigurationError: a request failed.
    """
    connection, keys = CommandConnection(url), Keys()
    async with Client.connect(url, model=model) as client:
        await configure(Queue(connection, keys.model(model)), scenario)
        # Warm up: one request of each kind before measuring.
        await client.generate([*TOKEN_IDS[:8]], SamplingParams(max_tokens=4, ignore_eos=True))
        setups = [engine.setup for engine in await client.engines()]
        history = RequestHistory(connection, keys.model(model))
        first_id, started_s = await history.last_event_id(), time.time()
        async with _counted_claims(url) as num_claims:
            notes = await _ask_engines(client, scenario, on_accepted)
        events = await _events(history, first_id)
        measures = _measures(scenario, notes, events, started_s)
        for note in notes.values():
            if note.claimed_s is not None:  # if it has not ended, it ends soon
                stats = (await (await client.handle(note.request_id)).result()).outputs[0].stats
                note.first_token_s = note.arrived_s + stats.time_to_first_token_s if stats else None
    _record_claims(measures, num_claims.total(), events)
    _record_tokens(measures, scenario)
    await connection.close()
    return measures, min(setup.kv_cache_size_tokens for setup in setups if setup is not None)


async def _ask_engines(client: Client, scenario: Scenario, on_accepted: OnAccepted | None) -> dict[str, Note]:
    """Send the requests of all tenants at their times, until the scenario ends."""
    notes: dict[str, Note] = {}
    began_s = time.monotonic()

    async def send(group: Tenants) -> None:
        random = Random(f"{scenario.seed} {group.name} prompts")
        async with asyncio.TaskGroup() as sending:
            for together in draw_calls(scenario, group):
                await asyncio.sleep(max(0.0, began_s + together[0].arrived_s - time.monotonic()))
                for note in together:
                    notes[note.request_id] = note
                    prompt = random.choices(TOKEN_IDS, k=note.num_prompt)
                    sending.create_task(_submit(client, note, prompt, on_accepted))

    await asyncio.gather(*map(send, scenario.tenants))
    await asyncio.sleep(max(0.0, began_s + scenario.duration_s - time.monotonic()))
    return notes


async def _submit(client: Client, note: Note, prompt: list[int], on_accepted: OnAccepted | None) -> None:
    params = SamplingParams(max_tokens=note.num_output, ignore_eos=True, temperature=0.0)
    await client.submit(prompt, params, tenant=note.tenant, band=note.group.band or None, request_id=note.request_id)
    if on_accepted is not None:
        await on_accepted(client, note)


async def _events(history: RequestHistory, after: str) -> list[RequestEvent]:
    events: list[RequestEvent] = []
    while page := await history.events(after=after, limit=PAGE):
        events += page
        after = page[-1].event_id
    return events


def _measures(scenario: Scenario, notes: dict[str, Note], events: Sequence[RequestEvent], started_s: float) -> Measures:
    """Convert the events to the measurements of a simulation.

    Raises:
        ConfigurationError: a request failed.
    """
    measures = Measures()
    for event in events:
        at_s = event.at - started_s
        if at_s > scenario.duration_s:
            break
        if (note := notes.get(event.request_id)) is None:
            continue
        if event.kind is EventKind.QUEUED:
            note.arrived_s = at_s
            measures.note_arrival(note)
        elif event.kind is EventKind.CLAIMED:
            measures.record_claim(event.request_id, max(note.arrived_s, event.epoch / 1e6 - started_s))
        elif event.kind is EventKind.FINISHED:
            note.ended_s = at_s
        else:
            raise ConfigurationError(f"{event.request_id} was {event.kind}: {event.cause or 'no cause is told'}")
    return measures


@asynccontextmanager
async def _counted_claims(url: str) -> AsyncIterator[Counter[bytes]]:
    """Yield a counter of the calls of the claiming script."""
    counter: Counter[bytes] = Counter()
    sha = SCRIPTS["claim"].sha.encode()
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.config_set("slowlog-max-len", MOST_CALLS)
        await client.config_set("slowlog-log-slower-than", 0)
        await client.slowlog_reset()

        async def look() -> None:
            async with client.pipeline(transaction=True) as both:
                both.execute_command("SLOWLOG", "GET", MOST_CALLS)
                both.execute_command("SLOWLOG", "RESET")
                calls, _ = await both.execute()
            counter[sha] += sum(call[3][1:2] == [sha] for call in calls)

        async def look_forever() -> None:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                await look()

        looking = asyncio.create_task(look_forever())
        try:
            yield counter
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await look()


def _record_claims(measures: Measures, num_claims: int, events: Sequence[RequestEvent]) -> None:
    """Record claims. Requests of one claim share engine and epoch, which is its time."""
    num_useful = len({(event.engine_id, event.epoch) for event in events if event.kind is EventKind.CLAIMED})
    measures.num_claims["real"] = num_claims
    measures.num_wasted["real"] = max(0, num_claims - num_useful)


def _record_tokens(measures: Measures, scenario: Scenario) -> None:
    """Record Jain's index of each window, by replaying when requests waited and tokens were computed."""
    moments: list[tuple[float, int, int, Note | None]] = []
    for note in measures.notes.values():
        moments.append((note.arrived_s, 0, 0, note))
        if note.claimed_s is not None:
            moments.append((note.claimed_s, 1, 0, note))
        if note.first_token_s is None or note.ended_s is None:
            continue
        moments.append((note.first_token_s, 2, note.num_prompt, note))
        for piece in range(NUM_PIECES):
            at_s = note.first_token_s + (note.ended_s - note.first_token_s) * piece / NUM_PIECES
            first, end = (note.num_output * place // NUM_PIECES for place in (piece, piece + 1))
            moments.append((at_s, 2, end - first, note))
    moments += [(number * WINDOW_S, 3, 0, None) for number in range(1, 1 + int(scenario.duration_s / WINDOW_S))]
    moments.sort(key=lambda moment: moment[:2])
    again = Measures()
    for at_s, kind, num_tokens, note in moments:
        if note is None:
            again.record_window(at_s)
        elif kind == 0:
            again.note_arrival(note)
        elif kind == 1:
            again.record_claim(note.request_id, at_s)
        else:
            again.record_tokens(note, num_tokens)
    measures.jain = again.jain
