"""Comparison of the events of requests under chaos with the output that their subscribers received."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ....producer import Client
from ....shared.queue.lifecycle import MOVES, RequestEvent, RequestState
from .load import Sighting

PAGE = 1000

Timelines = Mapping[str, Sequence[RequestEvent]]


async def read_timelines(client: Client, models: Sequence[str]) -> Timelines:
    """Return the events that are kept of all requests, by id, the oldest first."""
    by_request: defaultdict[str, list[RequestEvent]] = defaultdict(list)
    for model in models:
        after = "0-0"
        while events := await client.request_events(after=after, model=model, limit=PAGE):
            for event in events:
                by_request[event.request_id].append(event)
            after = events[-1].event_id
    return by_request


def find_violation(timeline: Sequence[RequestEvent], sighting: Sighting) -> str:
    """Return the error in the events of a request that its subscriber followed to the end; "" if there is none."""
    ends = [event for event in timeline if event.state.is_end]
    if len(ends) != 1 or not timeline[-1].state.is_end:
        return f"{len(ends)} ends in its events: {_kinds(timeline)}"
    for before, after in itertools.pairwise(timeline):
        if after.state not in MOVES[before.state]:
            return f"no such move, {before.kind.value} to {after.kind.value}: {_kinds(timeline)}"
    if ends[0].state is not RequestState.FINISHED or ends[0].num_output_tokens != len(sighting.token_ids):
        return f"its events end with {ends[0].num_output_tokens} tokens, {ends[0].state}: {_kinds(timeline)}"
    return ""


def _kinds(timeline: Sequence[RequestEvent]) -> str:
    return ", ".join(event.kind.value for event in timeline)
