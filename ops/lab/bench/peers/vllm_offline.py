# pyright: reportMissingImports=false
# (vLLM is installed in an environment of its own.)
"""vLLM's ``LLM`` in one process, stepped as ``LLM.generate`` steps it, so that the time of each token is known."""

from __future__ import annotations

import os
from typing import Any

from peer_run import Arguments, Arrivals, Request, adapters, run_peer
from vllm_options import engine_options, sampling_params, versions


class VllmOffline:
    """The engine inside ``LLM``, whose requests are added and stepped here."""

    def __init__(self, arguments: Arguments, workload: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self.versions = versions()
        self._engine = LLM(**engine_options(arguments, workload)).llm_engine
        self._num_added = 0
        self._adapters = {folder: self._adapter(i, folder) for i, folder in enumerate(adapters(workload), start=1)}

    def run(self, requests: list[Request], concurrency: int) -> None:
        arrivals = Arrivals(requests, concurrency)
        running: dict[str, Request] = {}
        while arrivals or running:
            for request in arrivals.take(len(running)):
                running[self._add_to_engine(request)] = request
            for output in self._engine.step():
                request = running[output.request_id]
                request.saw(list(output.outputs[0].token_ids))
                if output.finished:
                    del running[output.request_id]

    def pids(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        pass

    def _add_to_engine(self, request: Request) -> str:
        self._num_added += 1
        request_id = str(self._num_added)
        prompt = {"prompt_token_ids": request.prompt_token_ids}
        adapter = self._adapters.get(request.adapter)
        self._engine.add_request(request_id, prompt, sampling_params(request), lora_request=adapter)
        return request_id

    def _adapter(self, number: int, folder: str) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"adapter-{number}", number, folder)


if __name__ == "__main__":
    run_peer(VllmOffline)
