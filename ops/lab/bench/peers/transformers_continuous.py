"""transformers' continuous batching: a manager with a paged cache, tokens streamed request by request."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from peer_run import Arguments, Arrivals, Request, run_peer
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers_static import load_model

STOP_TIMEOUT_S = 30
RESULT_TIMEOUT_S = 1.0
PAGE_SIZE = 32


class TransformersContinuous:
    """The only manager for all phases. A streamed result repeats all tokens so far."""

    def __init__(self, arguments: Arguments, workload: dict[str, Any]) -> None:
        torch.set_num_threads(arguments.threads)
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        # On a GPU it chooses itself: cache and batch by the memory, graphs or none.
        config = ContinuousBatchingConfig(allow_block_sharing=False)
        if arguments.device == "cpu":
            config = _config_for_cpu(workload)
        generation = GenerationConfig(do_sample=False, max_new_tokens=1024, eos_token_id=-1, pad_token_id=0)
        self._manager = load_model(arguments).init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self._manager.start()

    def run(self, requests: list[Request], concurrency: int) -> None:
        arrivals = Arrivals(requests, concurrency)
        running: dict[str, Request] = {}
        while arrivals or running:
            for request in arrivals.take(len(running)):
                running[self._add_to_manager(request)] = request
            result = self._manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("continuous batching stopped")
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            request = running[result.request_id]
            request.saw(result.generated_tokens[len(request.output_token_ids) :])
            if request.is_complete:
                del running[result.request_id]

    def pids(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=STOP_TIMEOUT_S)

    def _add_to_manager(self, request: Request) -> str:
        request_id = self._manager.add_request(
            request.prompt_token_ids, max_new_tokens=request.max_tokens, streaming=True
        )
        if request_id is None:
            raise RuntimeError("continuous batching refused a request")
        return request_id


def _config_for_cpu(workload: dict[str, Any]) -> ContinuousBatchingConfig:
    num_tokens = max(sum(_num_tokens(r) for r in phase["requests"]) for phase in workload["phases"])
    # The field was block_size once (5.17).
    name = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
    page_size: dict[str, Any] = {name: PAGE_SIZE}
    return ContinuousBatchingConfig(
        **page_size,
        num_blocks=num_tokens // PAGE_SIZE + 2 * max(len(p["requests"]) for p in workload["phases"]),
        max_batch_tokens=2048,
        allow_block_sharing=False,
        use_cuda_graph=False,
    )


def _num_tokens(request: dict[str, Any]) -> int:
    return len(request["prompt_token_ids"]) + request["sampling_params"]["max_tokens"]


if __name__ == "__main__":
    run_peer(TransformersContinuous)
