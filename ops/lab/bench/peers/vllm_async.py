# pyright: reportMissingImports=false
# (vLLM is installed in an environment of its own.)
"""vLLM's ``AsyncLLM``: the engine as a server holds it, its core in a process of its own, without HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from peer_run import Arguments, Request, run_peer
from streams import follow_all
from vllm_options import engine_options, sampling_params, versions


class VllmAsync:
    """The only event loop for all phases, since the engine belongs to one."""

    def __init__(self, arguments: Arguments, workload: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.versions = versions()
        self._runner = asyncio.Runner()
        self._ids = count()

        async def make() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(arguments, workload)))

        self._engine = self._runner.run(make())

    def run(self, requests: list[Request], concurrency: int) -> None:
        self._runner.run(follow_all(requests, concurrency, self._stream))

    def pids(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        self._engine.shutdown()
        self._runner.close()

    async def _stream(self, request: Request) -> AsyncIterator[list[int]]:
        prompt = {"prompt_token_ids": request.prompt_token_ids}
        async for output in self._engine.generate(prompt, sampling_params(request), str(next(self._ids))):
            yield list(output.outputs[0].token_ids)


if __name__ == "__main__":
    run_peer(VllmAsync)
