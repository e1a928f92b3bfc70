"""Common parts of the scripts in this folder: command line, clock, memory and result file. Standard library only.

The workload file is that of ``penstock.worker.engine.offline``: phases, each with its requests and its concurrency. The
result file has the tokens of every request for each phase, and their times in seconds after the start of the phase; a
script whose rival reports no times leaves them empty.

A new rival is a script here with a class that implements ``Peer`` and imports nothing of Penstock, a line in
``choose_sides`` (``ops/lab/bench/engines/sides.py``), its package in ``install_peers.py``, and its versions in
``<name>.txt``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Arguments(argparse.Namespace):
    """The command line; ``spawned_at`` is ``time.monotonic()`` of whoever started the script, before it did."""

    model: Path
    workload: Path
    output: Path
    dtype: str
    threads: int
    device: str
    load_format: str
    file_type: str
    num_guesses: int
    spawned_at: float


class Request:
    """A request of the workload, and its output."""

    def __init__(self, index: int, fields: dict[str, Any], clock: Callable[[], float]) -> None:
        self.index = index
        self.prompt_token_ids: list[int] = fields["prompt_token_ids"]
        self.max_tokens: int = fields["sampling_params"]["max_tokens"]
        self.arrival_s: float = fields.get("arrival_s", 0.0)
        self.adapter: str = fields.get("adapter", "")
        self.output_token_ids: list[int] = []
        self.token_times_s: list[float] = []
        self.sent_s = self.arrival_s
        self._clock = clock

    def sent(self) -> None:
        """It goes to the rival now, or once it arrives."""
        self.sent_s = max(self.arrival_s, self._clock())

    def saw(self, token_ids: list[int]) -> None:
        """These came now."""
        self.output_token_ids += token_ids
        self.token_times_s += [self._clock()] * len(token_ids)

    def await_arrival(self) -> None:
        time.sleep(max(0.0, self.arrival_s - self._clock()))

    @property
    def has_arrived(self) -> bool:
        return self._clock() >= self.arrival_s

    @property
    def is_complete(self) -> bool:
        return len(self.output_token_ids) >= self.max_tokens


class Arrivals:
    """The requests of a phase in the order of their arrival; at most ``concurrency`` run at a time."""

    def __init__(self, requests: list[Request], concurrency: int) -> None:
        self._coming = sorted(requests, key=lambda request: (-request.arrival_s, -request.index))
        self._concurrency = concurrency

    def __bool__(self) -> bool:
        return bool(self._coming)

    def take(self, num_running: int) -> list[Request]:
        """Return the requests to send now, in addition to ``num_running``; if none runs, wait for the next."""
        if self._coming and not num_running:
            self._coming[-1].await_arrival()
        requests: list[Request] = []
        while self._coming and num_running + len(requests) < self._concurrency and self._coming[-1].has_arrived:
            requests.append(self._coming.pop())
            requests[-1].sent()
        return requests


class Peer(Protocol):
    """A rival that is ready to generate."""

    versions: dict[str, str]

    def run(self, requests: list[Request], concurrency: int) -> None:
        """Generate for all, at most ``concurrency`` at a time, and record tokens and times in each request."""
        ...

    def pids(self) -> list[int]:
        """Return the processes that, with their descendants, are the rival's."""
        ...

    def close(self) -> None: ...


def run_peer(open_peer: Callable[[Arguments, dict[str, Any]], Peer]) -> None:
    """Open the rival, run all phases of the workload on it and write the result."""
    arguments = _parse()
    workload = json.loads(arguments.workload.read_text())
    peer = open_peer(arguments, workload)
    try:
        ready_s = time.monotonic() - arguments.spawned_at
        phases = [_run_phase(peer, phase) for phase in workload["phases"]]
        rss_bytes, peak_rss_bytes = tree_memory(peer.pids())
    finally:
        peer.close()
    result = {
        "versions": peer.versions,
        "ready_s": ready_s,
        "rss_bytes": rss_bytes,
        "peak_rss_bytes": peak_rss_bytes,
        "phases": phases,
    }
    arguments.output.write_text(json.dumps(result))


def largest(workload: dict[str, Any]) -> tuple[int, int]:
    """Return the maximum concurrency, and the maximum tokens of a request, over all phases."""
    requests = [request for phase in workload["phases"] for request in phase["requests"]]
    num_tokens = [len(r["prompt_token_ids"]) + r["sampling_params"]["max_tokens"] for r in requests]
    return max(phase["concurrency"] for phase in workload["phases"]), max(num_tokens)


def adapters(workload: dict[str, Any]) -> list[str]:
    """Return the folders of all adapters in the workload, in a fixed order."""
    requests = [request for phase in workload["phases"] for request in phase["requests"]]
    return sorted({request["adapter"] for request in requests if request.get("adapter")})


def tree_memory(pids: list[int]) -> tuple[int, int]:
    """Resident bytes of the processes and all below them, now and each at its highest; shared pages count for each."""
    now = highest = 0
    for pid in pids:
        for member in _family(pid):
            fields = dict(
                line.split(":", 1) for line in Path(f"/proc/{member}/status").read_text().splitlines() if ":" in line
            )
            resident = _kib(fields.get("VmRSS"))
            now += resident
            highest += max(resident, _kib(fields.get("VmHWM")))  # the kernel updates it with a delay
    return now * 1024, highest * 1024


def _family(pid: int) -> list[int]:
    family = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        children = task / "children"
        # Some kernels have no such file; then child processes are not counted.
        for child in children.read_text().split() if children.exists() else ():
            family += _family(int(child))
    return family


def _kib(field: str | None) -> int:
    return int(field.split()[0]) if field else 0


def _run_phase(peer: Peer, phase: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    requests = [Request(i, fields, clock) for i, fields in enumerate(phase["requests"])]
    peer.run(requests, phase["concurrency"])
    return {
        "name": phase["name"],
        "wall_s": clock(),
        "output_token_ids": [request.output_token_ids for request in requests],
        "token_times_s": [request.token_times_s for request in requests],
        "sent_s": [request.sent_s for request in requests],
    }


def _parse() -> Arguments:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for_transformers = "for the scripts of transformers"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=for_transformers)
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help=f"{for_transformers}: dummy draws random weights on the device",
    )
    parser.add_argument("--file-type", choices=("", "Q8_0", "Q4_K_M"), default="", help="for llama.cpp: of its weights")
    parser.add_argument("--num-guesses", type=int, default=0, help="guess so many tokens from the text; 0: none")
    parser.add_argument("--spawned-at", type=float, default=time.monotonic())
    return parser.parse_args(namespace=Arguments())
