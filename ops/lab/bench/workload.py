"""The work all sides do: seeded random prompts, output lengths and arrivals, written once, read by all."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec

PROMPT_TOKENS = (32, 256)
OUTPUT_TOKENS = (64, 128)
SINGLE_PROMPT_TOKENS = 128
SINGLE_OUTPUT_TOKENS = 64
IDLE_PROMPT_TOKENS = 8
IDLE_OUTPUT_TOKENS = 2
NUM_IDLE = 40
NUM_CHECKED = 4
CHECKED_OUTPUT_TOKENS = 32

WARM_UP, ALL_AT_ONCE, ONE_AT_A_TIME, IDLE, CHECK = "warm-up", "all at once", "one at a time", "idle", "check"


class Item(msgspec.Struct):
    """A request: token ids and the exact number of tokens to generate (greedy, end of sequence ignored).

    ``grammar`` constrains the output, as arguments of ``StructuredOutputsParams``; rivals ignore it. ``adapter`` is the
    folder of an adapter, or empty.
    """

    prompt_token_ids: list[int]
    max_tokens: int
    arrival_s: float = 0.0
    grammar: dict[str, Any] | None = None
    adapter: str = ""

    def sampling(self) -> dict[str, Any]:
        """Arguments of ``SamplingParams``."""
        params = {"temperature": 0.0, "max_tokens": self.max_tokens, "ignore_eos": True, "detokenize": True}
        return params if self.grammar is None else params | {"structured_outputs": self.grammar}


class Phase(msgspec.Struct):
    """A part of the workload that runs to its end; at most ``concurrency`` requests run at a time.

    ``is_guessing`` and ``is_fresh`` are those of ``penstock.worker.engine.offline``; others ignore them.
    """

    name: str
    items: list[Item]
    concurrency: int
    is_guessing: bool = True
    is_fresh: bool = False


def make_workload(
    num_requests: int,
    vocab_size: int,
    seed: int,
    *,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
    output_tokens: tuple[int, int] = OUTPUT_TOKENS,
    requests_per_s: float = 0.0,
) -> list[Item]:
    """Lengths and ids drawn uniformly; the first ids of a vocabulary are left out, as they are often special.

    Arrivals are a Poisson process of ``requests_per_s``; all come at the start where that is 0.
    """
    random = Random(seed)
    items = []
    arrival_s = 0.0
    for _ in range(num_requests):
        num_prompt_tokens = random.randint(*prompt_tokens)
        token_ids = [random.randrange(8, vocab_size) for _ in range(num_prompt_tokens)]
        items.append(Item(token_ids, random.randint(*output_tokens), arrival_s))
        if requests_per_s:
            arrival_s += random.expovariate(requests_per_s)
    return items


def timed_phases(
    num_requests: int, num_single: int, vocab_size: int, seed: int, requests_per_s: float = 0.0
) -> list[Phase]:
    """Return the timed phases: all at once, one at a time, and one short request at a time, after a warm-up."""

    def fixed(count: int, seed: int, num_prompt_tokens: int, num_output_tokens: int) -> list[Item]:
        lengths = (num_prompt_tokens, num_prompt_tokens), (num_output_tokens, num_output_tokens)
        return make_workload(count, vocab_size, seed, prompt_tokens=lengths[0], output_tokens=lengths[1])

    everything = make_workload(num_requests, vocab_size, seed, requests_per_s=requests_per_s)
    single = fixed(num_single, seed + 1, SINGLE_PROMPT_TOKENS, SINGLE_OUTPUT_TOKENS)
    idle = fixed(NUM_IDLE, seed + 2, IDLE_PROMPT_TOKENS, IDLE_OUTPUT_TOKENS)
    return [
        Phase(WARM_UP, fixed(4, seed + 3, SINGLE_PROMPT_TOKENS, 4), 4),
        Phase(ALL_AT_ONCE, everything, num_requests),
        Phase(ONE_AT_A_TIME, single, 1),
        Phase(IDLE, idle, 1),
    ]


def check_phases(vocab_size: int, seed: int) -> list[Phase]:
    """Return the phases for the check before timing: a few shortened requests of the workload."""
    items = make_workload(NUM_CHECKED, vocab_size, seed)
    shortened = [msgspec.structs.replace(item, max_tokens=CHECKED_OUTPUT_TOKENS) for item in items]
    return [Phase(CHECK, shortened, NUM_CHECKED)]


def write_workload(phases: list[Phase], path: Path) -> None:
    """Write the file that ``penstock.worker.engine.offline`` and the scripts in ``peers`` read."""
    encoded = [
        {
            "name": phase.name,
            "concurrency": phase.concurrency,
            "is_guessing": phase.is_guessing,
            "is_fresh": phase.is_fresh,
            "requests": [
                {
                    "prompt_token_ids": item.prompt_token_ids,
                    "sampling_params": item.sampling(),
                    "arrival_s": item.arrival_s,
                    "adapter": item.adapter,
                }
                for item in phase.items
            ],
        }
        for phase in phases
    ]
    path.write_bytes(msgspec.json.encode({"phases": encoded}))
