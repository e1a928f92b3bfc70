"""``penstock bench``: the engine, the stack and the queue against their rivals, each in the same run.

This module names the rows. It imports little, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ....shared.process.command_line import Command, UsageError

QUEUE_ROWS = ("enqueue", "scale", "fairness", "idle", "fleet", "costs", "figures", "ledger", "follow")
_ENGINE_ROWS = ("engine", "adapter", "gateway", "growth", "sessions", "pooling", "lora", "speculation")
ROWS = (*_ENGINE_ROWS, "durability", "recovery", *QUEUE_ROWS)
PEERS = ("vllm", "transformers", "llama")
NO_PEERS = "none"
DEFAULT_PEERS_FOLDER = ".bench-peers"


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        default="",
        metavar="ROWS",
        help=f"comma-separated: {', '.join(ROWS)}; queue means the last {len(QUEUE_ROWS)} (default all)",
    )
    parser.add_argument(
        "--models",
        default="tiny,smol135",
        help="comma-separated: demo, tiny, smol135, qwen06 (default tiny,smol135)",
    )
    parser.add_argument(
        "--peers",
        default="",
        help=f"rivals of the row engine, comma-separated: {', '.join(PEERS)}, or {NO_PEERS} (default all)",
    )
    parser.add_argument(
        "--peers-folder",
        type=Path,
        default=Path(DEFAULT_PEERS_FOLDER),
        metavar="DIR",
        help=f"where `make bench-peers` has put them (default {DEFAULT_PEERS_FOLDER})",
    )
    parser.add_argument(
        "--sides",
        default="",
        metavar="NAMES",
        help="of the row engine only these, as its tables name them, with semicolons between them (default all)",
    )
    parser.add_argument("--requests", type=int, default=0, help="requests at once (default 64; qwen06: 16)")
    parser.add_argument("--single", type=int, default=6, help="requests one at a time (default 6)")
    parser.add_argument(
        "--arrivals", type=float, default=0.0, metavar="PER_S", help="requests/s that come; 0: all at the start"
    )
    parser.add_argument("--rounds", type=int, default=2, help="times each side of engine and fairness runs (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the workload (default 0)")
    parser.add_argument(
        "--threads",
        type=int,
        help="torch threads of our engines (default: all cores, as the rivals have; 0 lets the engine choose)",
    )
    parser.add_argument(
        "--engine-options", default="", metavar="WORDS", help="further options of `worker start`, for our engines"
    )
    parser.add_argument(
        "--queue-depth",
        type=int,
        default=1_000_000,
        metavar="N",
        help="requests that wait in the row scale; a million take about 1 GiB of memory (default 1000000)",
    )
    parser.add_argument("--json", type=Path, default=Path("bench-results/bench.json"), help="where the JSON goes")


def _run_bench_command(arguments: argparse.Namespace) -> int:
    rows, peers = chosen_rows(arguments.only), chosen_peers(arguments.peers)
    if arguments.threads is None:
        # Not the option's default, since `penstock --help` must not need it: Windows and macOS lack it.
        arguments.threads = len(os.sched_getaffinity(0))
    for name, least in (("queue-depth", 1), ("rounds", 1), ("single", 1), ("requests", 0), ("threads", 0)):
        if (value := getattr(arguments, name.replace("-", "_"))) < least:
            raise UsageError(f"--{name} must be at least {least}, got {value}")
    from .run import BenchOptions, run_bench  # rich and psutil are not for every `penstock` command

    options = BenchOptions(
        rows=rows,
        models=arguments.models.split(","),
        peers=peers,
        peers_folder=arguments.peers_folder,
        num_requests=arguments.requests,
        num_single=arguments.single,
        requests_per_s=arguments.arrivals,
        rounds=arguments.rounds,
        seed=arguments.seed,
        threads=arguments.threads,
        engine_options=shlex.split(arguments.engine_options),
        queue_depth=arguments.queue_depth,
        json_path=arguments.json,
        sides=[name.strip() for name in arguments.sides.split(";") if name.strip()],
    )
    return run_bench(options)


COMMAND = Command(
    "bench",
    "Measure the engine, the stack and the queue against their rivals.",
    _run_bench_command,
    _add_bench_arguments,
)


def chosen_rows(only: str) -> frozenset[str]:
    """Return the rows that ``--only`` names, comma-separated; all if it is empty.

    Raises:
        UsageError: no row has such a name.
    """
    chosen: set[str] = set()
    for name in _names(only):
        if name == "queue":
            chosen |= set(QUEUE_ROWS)
        elif name in ROWS:
            chosen.add(name)
        else:
            raise UsageError(f"--only must name rows of {', '.join(ROWS)}, or queue, got {name!r}")
    return frozenset(chosen or ROWS)


def chosen_peers(peers: str) -> frozenset[str]:
    """Return the rivals that ``--peers`` names, comma-separated; all if it is empty, none for "none".

    Raises:
        UsageError: no rival has such a name.
    """
    names: Sequence[str] = _names(peers) or PEERS
    if list(names) == [NO_PEERS]:
        return frozenset()
    for name in names:
        if name not in PEERS:
            raise UsageError(f"--peers must name rivals of {', '.join(PEERS)}, or {NO_PEERS}, got {name!r}")
    return frozenset(names)


def _names(words: str) -> list[str]:
    return list(filter(None, (part.strip() for part in words.split(","))))
