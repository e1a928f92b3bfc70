"""Instructions of Redis for the ledger and budgets: ``python -m penstock.ops.lab.bench.queue.instructions``.

The same comparison as ``penstock bench --only ledger``, with valgrind's count of instructions in place of processor
time. It hardly depends on what else the machine does, and takes minutes.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
import time
from pathlib import Path

from .....shared.connection import CommandConnection
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
        # hz: its regular work would count more often on a busy machine.
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


async def _measure(server: CountedServer) -> dict[tuple[int, str], float]:
    commands, per_request = CommandConnection(f"unix://{server.socket}"), {}
    try:
        await set_budgets(commands)
        for number in range(2):  # the first time loads the scripts
            for at_once in AT_ONCE:
                for side in SIDES:
                    ids = [f"r{number}-{at_once}-{i}" for i in range(NUM_REQUESTS)]
                    server.count()
                    await run_requests(commands, side, ids, at_once)
                    per_request[at_once, side] = server.count() / NUM_REQUESTS
    finally:
        await commands.close()
    return per_request


def main() -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        server = CountedServer(Path(folder))
        try:
            per_request = asyncio.run(_measure(server))
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
