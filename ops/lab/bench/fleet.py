"""Scaling of a fleet with its queue: ``python -m penstock.ops.lab.bench.fleet``, on a Ray cluster of this machine.

A fleet of one engine of the demo model gets so many requests that they wait longer than wanted, and grows. Then most
clients stop, and it shrinks while the others continue. The output is the time from the first of the many requests to
another serving engine, with its parts, and the number of requests that were lost or gave other tokens meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ....producer import Client, SamplingParams
from ....shared.connection import CommandConnection
from ....shared.deployment.presence import read_heartbeats
from ....shared.keys import Keys
from ....shared.metrics import SERVING
from ....shared.process.command_line import UsageError
from ...demo.run import MODEL
from ...local.stack import private_redis
from ...local.worker import LocalWorker
from ..clusters.ray_cluster import RayCluster

MAX_NUM_SEQS, NUM_MANY, NUM_FEW = 4, 200, 2
WANTED_WAIT_S, SHRINK_AFTER_S = 1.0, 5.0
POLL_S, TIMEOUT_S = 0.05, 240.0
PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
PROMPT = "count from four to nine:"


class Round(msgspec.Struct, kw_only=True):
    """A growth and a shrinking, in seconds from the first of many requests.

    Args:
        decided_s: time until the fleet wanted more engines, including its delay ``grow_after_s`` (3).
        serving_s: time until another engine served.
        start_s: part of that from the request for resources to a serving engine.
        num_requests: requests that ended meanwhile; ``num_lost`` did not, ``num_different`` gave other tokens.
    """

    decided_s: float
    serving_s: float
    start_s: float
    num_left: int
    num_requests: int
    num_lost: int
    num_different: int


def main() -> None:
    """Measure, and print each round and the medians."""
    parser = argparse.ArgumentParser(description="a fleet on Ray: queue growth to a serving engine, and shrinking")
    parser.add_argument("--rounds", type=int, default=3, help="growths (default 3)")
    parser.add_argument("--engines", type=int, default=2, help="most engines (default 2)")
    args = parser.parse_args()
    if args.rounds < 1 or args.engines < 2:
        raise UsageError(f"--rounds must be at least 1 and --engines 2, got {args.rounds} and {args.engines}")
    with (
        tempfile.TemporaryDirectory(prefix="penstock-fleet-") as folder,
        private_redis(append_only=True) as url,
        RayCluster(Path(folder) / "ray.log") as cluster,
    ):
        cluster.add(args.engines)
        options = ["--ray", cluster.address, "--engines", f"1:{args.engines}", "--device", "cpu", "--threads", "1"]
        options += ["--served-model-name", "demo", "--max-num-seqs", str(MAX_NUM_SEQS), "--kv-cache-memory", "64MiB"]
        options += ["--wanted-wait", str(WANTED_WAIT_S), "--shrink-after", str(SHRINK_AFTER_S)]
        fleet = LocalWorker(str(MODEL), url, [*options, "--log-format", "json"], Path(folder) / "fleet.log")
        try:
            fleet.spawn()
            fleet.await_ready()
            print(f"one engine serves after {fleet.ready_time_s:.1f} s", flush=True)
            rounds = asyncio.run(_measure_fleet(url, fleet, args.rounds))
        finally:
            fleet.stop()
        _print_rounds(rounds, cluster.left())


async def _measure_fleet(url: str, fleet: LocalWorker, num_rounds: int) -> list[Round]:
    commands = CommandConnection(url)
    rounds: list[Round] = []
    async with Client.connect(url, model="demo") as client:
        expected = list((await client.generate(PROMPT, PARAMS)).outputs[0].token_ids)
        for number in range(num_rounds):
            rounds.append(await _grow_and_shrink(client, commands, fleet, expected))
            one = rounds[-1]
            print(
                f"round {number + 1}: decided after {one.decided_s:.1f} s, another engine after {one.serving_s:.1f} s "
                f"({one.start_s:.1f} of them to place and start it); {one.num_requests} requests, {one.num_left} "
                f"engines drained, {one.num_lost} lost, {one.num_different} different",
                flush=True,
            )
    await commands.close()
    return rounds


async def _grow_and_shrink(
    client: Client, commands: CommandConnection, fleet: LocalWorker, expected: list[int]
) -> Round:
    num_events = len(_events(fleet))
    answers: list[list[int]] = []
    num_asked = 0

    async def ask(enough: asyncio.Event) -> None:
        nonlocal num_asked
        while not enough.is_set():
            num_asked += 1
            handle = await client.submit(PROMPT, PARAMS)
            answers.append(list((await handle.result()).outputs[0].token_ids))

    has_grown, has_shrunk = asyncio.Event(), asyncio.Event()
    began_at, began = time.time(), time.perf_counter()
    many = [asyncio.create_task(ask(has_grown)) for _ in range(NUM_MANY)]
    few = [asyncio.create_task(ask(has_shrunk)) for _ in range(NUM_FEW)]
    async with asyncio.timeout(TIMEOUT_S):
        await _until(commands, lambda number: number > 1)
        serving_s = time.perf_counter() - began
        has_grown.set()
        await asyncio.gather(*many)
        await _until(commands, lambda number: number == 1)
        has_shrunk.set()
        await asyncio.gather(*few)
    events = _events(fleet)[num_events:]
    decided = next(event for event in events if event["event"] == "fleet_target")
    started = next(event for event in events if event["event"] == "fleet_engine_serves")
    return Round(
        decided_s=datetime.fromisoformat(decided["timestamp"]).timestamp() - began_at,
        serving_s=serving_s,
        start_s=started["took_s"],
        num_left=sum(event["event"] == "fleet_engine_leaves" for event in events),
        num_requests=len(answers),
        num_lost=num_asked - len(answers),
        num_different=sum(answer != expected for answer in answers),
    )


async def _until(commands: CommandConnection, is_enough: Any) -> None:
    while True:
        beats = await read_heartbeats(commands.execute, Keys())
        if is_enough(sum(beat.state in SERVING for beat in beats)):
            return
        await asyncio.sleep(POLL_S)


def _events(fleet: LocalWorker) -> list[dict[str, Any]]:
    return [json.loads(line) for line in fleet.log.splitlines() if line.startswith("{")]


def _print_rounds(rounds: list[Round], left: dict[str, int]) -> None:
    def median(values: list[float]) -> str:
        return f"{statistics.median(values):.1f}"

    print(
        f"queue growth to a serving engine: {median([one.serving_s for one in rounds])} s, "
        f"{median([one.decided_s for one in rounds])} until it was decided, "
        f"{median([one.start_s for one in rounds])} to place and start it"
    )
    print(
        f"while engines came and left: {sum(one.num_requests for one in rounds)} requests, "
        f"{sum(one.num_lost for one in rounds)} lost, {sum(one.num_different for one in rounds)} different; "
        f"afterwards {left['actors']} actors and {left['groups']} groups are left"
    )


if __name__ == "__main__":
    main()
