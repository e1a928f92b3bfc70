"""Instructions of Redis for the ledger and budgets: ``python -m penstock.ops.lab.bench.queue.instructions``.

The same comparison as ``penstock bench --only ledger``, with valgrind's count of instructions in place of processor
time. It hardly depends on what else the machine does, and takes minutes.
``PENSTOCK_REDIS_SERVER=/path/to/redis-server`` selects the server; the first line says its version. What a server does
every second without a request (``serverCron``) is not counted: a run on a busy machine, which takes longer, has more.

Lua's collector moves a run by about 0.5 %, since it may stop anywhere in a collection. Each run therefore begins and
ends with a full one, and the figures are means of the rounds, in which the sides take turns at being first.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from .....shared import connection
from .....shared.connection import CommandConnection
from .....shared.redis_access.check import info_fields
from .....shared.redis_access.embedded.server import find_redis_server
from .ledger import AT_ONCE, SIDES, run_requests, set_budgets

NUM_REQUESTS = 256
START_TIMEOUT_S = 60.0


class CountedServer:
    """A redis-server in valgrind that writes its file every second.

    Args:
        folder: of its socket and files.
    """

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self._dumps = folder / "callgrind"
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={self._dumps}"]
        valgrind += ["--toggle-collect=serverCron", "--collect-atstart=yes"]  # in this order: off within it
        options = {"port": 0, "unixsocket": self.socket, "dir": folder, "appendonly": "yes", "save": "", "hz": 1}
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen(
            [*valgrind, str(find_redis_server()), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._num_dumps = 0
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.socket.exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)

    def count(self) -> int:
        """Return the number of instructions since the last call."""
        control = ["callgrind_control", "--dump", str(self.process.pid)]
        subprocess.run(control, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._num_dumps += 1
        text = Path(f"{self._dumps}.{self._num_dumps}").read_text(errors="replace")
        match = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        if match is None:
            raise RuntimeError("valgrind has written no number of instructions")
        return int(match[1])


async def _count(server: CountedServer, commands: CommandConnection, calls: Awaitable[None]) -> int:
    """Return the instructions of calls, with the whole collection of what they leave."""
    await commands.execute("EVAL", "collectgarbage()", 0)
    server.count()
    await calls
    await commands.execute("EVAL", "collectgarbage()", 0)
    return server.count()


async def _measure(server: CountedServer, num_rounds: int) -> dict[tuple[int, str], float]:
    commands = CommandConnection(f"unix://{server.socket}")
    counts: dict[tuple[int, str], list[float]] = {(at_once, side): [] for at_once in AT_ONCE for side in SIDES}
    try:
        version = info_fields(await commands.execute("INFO", "server"))["redis_version"]
        print(f"Redis {version}, {num_rounds} rounds of {NUM_REQUESTS} requests", flush=True)
        await set_budgets(commands)
        for side in SIDES:
            await run_requests(commands, side, ["first"], 1)  # loads the scripts
        for number, at_once in itertools.product(range(num_rounds), AT_ONCE):
            first = number % len(SIDES)
            for side in (*SIDES[first:], *SIDES[:first]):
                ids = [f"r{number}-{at_once}-{i}" for i in range(NUM_REQUESTS)]
                count = await _count(server, commands, run_requests(commands, side, ids, at_once))
                counts[at_once, side].append(count / NUM_REQUESTS)
    finally:
        await commands.close()
    return {key: statistics.mean(of_rounds) for key, of_rounds in counts.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each side (3)")
    num_rounds = parser.parse_args().rounds
    # In valgrind a call may take longer than an answer of a live server.
    connection.MAX_SILENT_LOOKS *= 60
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        server = CountedServer(Path(folder))
        try:
            per_request = asyncio.run(_measure(server, num_rounds))
        finally:
            server.process.terminate()
            server.process.wait()
    for at_once in AT_ONCE:
        none = per_request[at_once, SIDES[0]]
        for side in SIDES:
            number = per_request[at_once, side]
            print(
                f"calls of {at_once:2}, {side:7}: {number:11,.0f} instructions per request ({number / none - 1:+.1%})"
            )


if __name__ == "__main__":
    main()
