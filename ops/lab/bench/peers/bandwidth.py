"""Prints the bandwidth of memory in GB/s as JSON, by loop of torch: read (a sum), copy, triad (``a = b + s * c``)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch

NUM_FLOATS = 64 << 20
PASSES = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    torch.set_num_threads(parser.parse_args().threads)
    a, b, c = torch.zeros(NUM_FLOATS), torch.ones(NUM_FLOATS), torch.ones(NUM_FLOATS)
    array_bytes = 4 * NUM_FLOATS
    rates = {
        "read": array_bytes / _best_s(lambda: b.sum()),
        "copy": 2 * array_bytes / _best_s(lambda: a.copy_(b)),
        "triad": 3 * array_bytes / _best_s(lambda: torch.add(b, c, alpha=3.0, out=a)),
    }
    json.dump({loop: rate / 1e9 for loop, rate in rates.items()}, sys.stdout)


def _best_s(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(PASSES):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    main()
