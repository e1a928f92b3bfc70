"""``python -m penstock.ops.lab.survey.fitting``: how many requests fit into a KV cache, for models with windows.

The engine's scheduler runs requests of ``--tokens`` tokens, prompts first, without computing: once with one block
table for all layers, and once with a table for each group of them (ops/decisions/kv_blocks.md). Both have the bytes in
which ``--requests`` of them fit with one table. The output is the largest number that ran concurrently without
preemption.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ....shared.params.sampling import SamplingParams
from ....worker.config.batch import DEFAULT_TOKEN_BUDGET
from ....worker.engine.scheduling.block_pool import BlockGroups, BlockPool
from ....worker.engine.scheduling.block_tables import BlockTables, GroupedTables, SingleBlockTable
from ....worker.engine.scheduling.request import Request
from ....worker.engine.scheduling.scheduler import Scheduler
from ....worker.engine.scheduling.scheduler_output import SampledTokens
from ....worker.models.attention.call import AttentionCall, CacheFormat
from ....worker.models.attention.pages import plan_pages

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 32_768


@dataclass(frozen=True)
class Shape:
    """Layers of a model: one in every ``one_in`` sees everything, the last of them; the others a window."""

    num_layers: int
    one_in: int
    window: int

    def calls(self) -> list[AttentionCall]:
        """Return the attention calls of the shape, all of one size."""
        is_full = [index % self.one_in == self.one_in - 1 for index in range(self.num_layers)]
        windows = [None if full else self.window for full in is_full]
        dtype = torch.bfloat16
        return [
            AttentionCall(
                nn.Identity(), (1, 1), (1, 1), dtype, window, has_own_rule=False, cache_format=CacheFormat(dtype)
            )
            for window in windows
        ]


SHAPES = {
    "Gemma 3 1B": Shape(26, 6, 512),
    "Gemma 3 4B": Shape(34, 6, 1024),
    "Gemma 3 12B": Shape(48, 6, 1024),
    "Gemma 3 27B": Shape(62, 6, 1024),
    "Gemma 2 9B": Shape(42, 2, 4096),
    "gpt-oss 20B": Shape(24, 2, 128),
    "Command R7B": Shape(32, 4, 4096),
}


def count_fitting(make_tables: Callable[[], BlockTables], num_tokens: int, budget: int, at_most: int) -> int:
    """Return the most requests of ``num_tokens`` that run concurrently to their ends without preemption."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _all_fit(make_tables(), middle, num_tokens, budget) else (low, middle - 1)
    return low


def _all_fit(tables: BlockTables, num_requests: int, num_tokens: int, budget: int) -> bool:
    scheduler = Scheduler(
        tables.pool,
        max_num_seqs=num_requests,
        max_num_batched_tokens=budget,
        max_model_len=num_tokens + 1,
        tables=tables,
    )
    # Enough to keep decoding while the prompts of all others are computed.
    num_steps = -(-num_tokens * num_requests // (budget - num_requests))
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for index in range(num_requests):
        prompt = [1] * (num_tokens - num_steps - _BLOCK_SIZE)
        scheduler.add_request(Request(str(index), prompt, params, max_model_len=num_tokens))
    most = 0
    while scheduler.has_unfinished_requests:
        output = scheduler.schedule()
        most = max(most, sum(request.num_output_tokens > 0 for request in output.requests))
        has_ended = scheduler.num_unfinished_requests < num_requests
        if scheduler.stats().num_preemptions or (has_ended and most < num_requests):
            return False
        caught_up = [request.num_uncomputed_tokens == count for request, count in output.work()]
        scheduler.update_from_output(output, SampledTokens([[1] if has else [] for has in caught_up]))
    return most == num_requests


def compare(shape: Shape, num_tokens: int, num_requests: int, budget: int) -> tuple[int, int, str]:
    """Return the numbers that fit with one table and with groups, and a description of the groups."""
    calls = shape.calls()
    layout = plan_pages(calls, _MAX_MODEL_LEN, _BLOCK_SIZE)
    num_blocks = num_requests * -(-num_tokens // _BLOCK_SIZE)
    one = count_fitting(
        lambda: SingleBlockTable(BlockPool(num_blocks, _BLOCK_SIZE)), num_tokens, budget, at_most=num_requests + 1
    )
    if layout is None:
        return one, one, "one table"
    groups = BlockGroups(layout.windows, _BLOCK_SIZE, budget)
    num_pages = num_blocks * len(calls) // layout.num_places - 1
    several = count_fitting(
        lambda: GroupedTables(BlockPool(num_pages, _BLOCK_SIZE), groups),
        num_tokens,
        budget,
        at_most=num_pages // groups.decode_blocks(num_tokens - _BLOCK_SIZE) + 1,
    )
    return one, several, f"{len(layout.windows)} of {layout.num_places} layers"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="of a request")
    parser.add_argument("--requests", type=int, default=20, help="that fit with one table")
    parser.add_argument("--budget", type=int, default=DEFAULT_TOKEN_BUDGET["cuda"], help="tokens of a step")
    options = parser.parse_args(arguments)
    sys.stdout.write("| model | groups | tokens | one table | groups | ratio |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for name, shape in SHAPES.items():
        for num_tokens in options.tokens:
            one, several, groups = compare(shape, num_tokens, options.requests, options.budget)
            sys.stdout.write(f"| {name} | {groups} | {num_tokens:,} | {one} | {several} | {several / one:.2f} |\n")


if __name__ == "__main__":
    main()
