# pyright: reportMissingImports=false
# (aiohttp comes with vLLM, in an environment of its own.)
"""vLLM's HTTP server in processes of its own, its completions streamed by one client over one connection pool."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from peer_run import Arguments, Request, run_peer
from streams import follow_all
from vllm_options import engine_options, versions

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.1
NAME = "model"


class VllmHttp:
    """Starts the server and waits until it says that it is healthy."""

    def __init__(self, arguments: Arguments, workload: dict[str, Any]) -> None:
        self.versions = versions()
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--served-model-name", NAME, "--disable-uvicorn-access-log"]
        self._server = subprocess.Popen([*command, *_flags(engine_options(arguments, workload))])
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise

    def run(self, requests: list[Request], concurrency: int) -> None:
        asyncio.run(self._run_concurrently(requests, concurrency))

    def pids(self) -> list[int]:
        return [self._server.pid]

    def close(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    async def _run_concurrently(self, requests: list[Request], concurrency: int) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

            async def stream(request: Request) -> AsyncIterator[list[int]]:
                body = {
                    "model": NAME,
                    "prompt": request.prompt_token_ids,
                    "temperature": 0.0,
                    "max_tokens": request.max_tokens,
                    "ignore_eos": True,
                    "stream": True,
                    "return_token_ids": True,
                }
                async with session.post(f"{self._url}/v1/completions", json=body) as response:
                    response.raise_for_status()
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            chunk = json.loads(line[len(b"data: ") :])
                            yield [token for choice in chunk["choices"] for token in choice["token_ids"] or []]

            await follow_all(requests, concurrency, stream)

    def _await_ready(self) -> None:
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self._url}/health", timeout=1).close()
                return
            if self._server.poll() is not None:
                raise RuntimeError(f"the server ended with {self._server.returncode}")
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"the server was not ready within {READY_TIMEOUT_S:g} s")
            time.sleep(POLL_S)


def _flags(options: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    run_peer(VllmHttp)
