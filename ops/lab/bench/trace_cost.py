"""Cost of spans: ``python -m penstock.ops.lab.bench.trace_cost``.

The same short requests run on three deployments of the demo model: without tracing, with a sampler that drops all, and
with one that samples all. Rounds alternate. The output is CPU time per request, over all threads of a process. Other
load makes it noisier, but hardly larger.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import psutil

from ....producer import Client, SamplingParams
from ....shared.connection import CommandConnection
from ....shared.deployment.presence import read_heartbeats
from ....shared.keys import Keys
from ...demo.run import MODEL
from ...local.stack import LocalStack

OPTIONS = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--log-level", "warning"]
SAMPLERS = {"off": None, "unsampled": "parentbased_always_off", "sampled": "parentbased_always_on"}
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
_SAMPLER = "OTEL_TRACES_SAMPLER"


def main() -> None:
    parser = argparse.ArgumentParser(description="What spans cost a request, in CPU time.")
    parser.add_argument("--rounds", type=int, default=9, help="of each deployment (9)")
    parser.add_argument("--requests", type=int, default=400, help="of a round (400)")
    args = parser.parse_args()
    with ExitStack() as stack:
        endpoint = stack.enter_context(sink())
        stacks: dict[str, LocalStack] = {}
        for name, sampler in SAMPLERS.items():
            options = OPTIONS if sampler is None else [*OPTIONS, "--otlp-traces-endpoint", endpoint]
            with sampling(sampler):
                stacks[name] = stack.enter_context(LocalStack(MODEL, options))
        asyncio.run(measure(stacks, endpoint, args.rounds, args.requests))


async def measure(stacks: dict[str, LocalStack], endpoint: str, num_rounds: int, num_requests: int) -> None:
    """Print for each deployment microseconds of CPU time for a request, of its client and of its worker process."""
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in stacks}
    for _ in range(num_rounds + 1):
        for name, stack in stacks.items():
            with sampling(SAMPLERS[name]):
                async with Client(stack.url, otlp_traces_endpoint=None if name == "off" else endpoint) as client:
                    costs[name].append(await one_round(client, await worker_of(stack.url), num_requests))
    for name, rounds in costs.items():
        client_us, worker_us = (statistics.median(row[side] for row in rounds[1:]) for side in (0, 1))
        print(f"{name:<10} client {client_us:6.0f} us   worker process {worker_us:6.0f} us")


async def one_round(client: Client, worker: psutil.Process, num_requests: int) -> tuple[float, float]:
    """Return microseconds of CPU time for a request, of this process and of the worker process."""
    at_once = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        async with at_once:
            await client.generate(f"{number} + 4 =", PARAMS)

    started_s, worker_started_s = time.process_time(), cpu_s(worker)
    await asyncio.gather(*map(one, range(num_requests)))
    scale = 1e6 / num_requests
    return (time.process_time() - started_s) * scale, (cpu_s(worker) - worker_started_s) * scale


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def worker_of(url: str) -> psutil.Process:
    """Return the worker process of a deployment with one engine."""
    commands = CommandConnection(url)
    try:
        (beat,) = await read_heartbeats(commands.execute, Keys())
    finally:
        await commands.close()
    return psutil.Process(beat.worker_pid)


@contextmanager
def sampling(sampler: str | None) -> Generator[None]:
    """Processes and clients that begin inside have this sampler."""
    before = os.environ.pop(_SAMPLER, None)
    if sampler is not None:
        os.environ[_SAMPLER] = sampler
    try:
        yield
    finally:
        os.environ.pop(_SAMPLER, None)
        if before is not None:
            os.environ[_SAMPLER] = before


@contextmanager
def sink() -> Generator[str]:
    """Yield the URL of a receiver that accepts everything, in its own process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


class _Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def _receive(told: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    told.send(server.server_port)
    server.serve_forever()


if __name__ == "__main__":
    main()
