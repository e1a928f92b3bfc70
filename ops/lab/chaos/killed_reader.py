"""Processes that read a request's stream and are killed in the middle, as the server of a web page may be.

``python -m penstock.ops.lab.chaos.killed_reader URL SHARDS`` is such a process. It connects, prints an empty line,
takes the id and the model of a request from standard input, and prints the deltas of its stream as lines of JSON.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from ....producer import Client, Delta, PenstockError

# A reader that is not connected by then prints its stacks and ends; the request, which waits for it, goes on.
MAX_START_S = 300.0


class KilledReaders:
    """Starts the processes.

    Attributes:
        num_killed: processes that were killed before the end of their stream.
    """

    def __init__(self, url: str, shards: Mapping[str, str]) -> None:
        self._arguments = [url, msgspec.json.encode(shards).decode()]
        self.num_killed = 0

    @asynccontextmanager
    async def started(self) -> AsyncIterator[Process]:
        """Start a process that is connected, so that it reads while the request runs."""
        command = [sys.executable, "-m", __spec__.name, *self._arguments]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        try:
            assert process.stdout is not None
            await process.stdout.readline()
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def read(self, process: Process, request_id: str, model: str) -> AsyncGenerator[Delta]:
        """Iterate over the first delta that the process receives, and kill it.

        Yields nothing if the process could not read the stream, for example because Redis is unreachable.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode((request_id, model)) + b"\n")
        line = await process.stdout.readline()
        if not line:
            return
        delta = msgspec.json.decode(line, type=Delta)
        if not delta.finished:
            process.kill()
            self.num_killed += 1
        yield delta


async def _print_stream(url: str, shards: dict[str, str]) -> None:
    async with Client.connect(url, shards=shards) as client:
        faulthandler.cancel_dump_traceback_later()
        print(flush=True)
        request_id, model = msgspec.json.decode(sys.stdin.readline())
        async for delta in (await client.handle(request_id, model=model)).stream():
            print(msgspec.json.encode(delta).decode(), flush=True)


def main() -> int:
    """Return 1 if the stream could not be read."""
    faulthandler.dump_traceback_later(MAX_START_S, exit=True)
    try:
        asyncio.run(_print_stream(sys.argv[1], msgspec.json.decode(sys.argv[2])))
    except PenstockError as error:
        print(f"reader: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
