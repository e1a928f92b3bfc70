"""transformers' ``generate`` on one batch, padded on the left, until its longest request has all its tokens."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from peer_run import Arguments, Request, run_peer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar


class Ticker(BaseStreamer):
    """Gives each step's tokens to the requests that still want one; the prompts come first and are left out."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self._has_seen_prompts = False

    def put(self, value: torch.Tensor) -> None:
        if not self._has_seen_prompts:
            self._has_seen_prompts = True
            return
        for request, token_id in zip(self._requests, value.tolist(), strict=True):
            if not request.is_complete:
                request.saw([token_id])

    def end(self) -> None:
        pass


class TransformersStatic:
    """A batch of ``concurrency`` requests after the other."""

    def __init__(self, arguments: Arguments, workload: dict[str, Any]) -> None:
        del workload
        torch.set_num_threads(arguments.threads)
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self._model = load_model(arguments)

    def run(self, requests: list[Request], concurrency: int) -> None:
        for start in range(0, len(requests), concurrency):
            batch = requests[start : start + concurrency]
            for request in batch:
                request.sent()
            batch[-1].await_arrival()
            self._run_batch(batch)

    def pids(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        pass

    @torch.inference_mode()
    def _run_batch(self, requests: list[Request]) -> None:
        longest = max(len(request.prompt_token_ids) for request in requests)
        input_ids = torch.zeros(len(requests), longest, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, request in enumerate(requests):
            start = longest - len(request.prompt_token_ids)
            input_ids[row, start:] = torch.tensor(request.prompt_token_ids)
            attention_mask[row, start:] = 1
        self._model.generate(
            input_ids=input_ids.to(self._model.device),
            attention_mask=attention_mask.to(self._model.device),
            do_sample=False,
            max_new_tokens=max(request.max_tokens for request in requests),
            eos_token_id=None,
            pad_token_id=0,
            streamer=Ticker(requests),
        )


def load_model(arguments: Arguments) -> Any:
    """Load the model in ``arguments.dtype`` with transformers, or with random weights drawn on the device."""
    disable_progress_bar()
    dtype = getattr(torch, arguments.dtype)
    if arguments.load_format == "dummy":
        with torch.device(arguments.device):
            config = AutoConfig.from_pretrained(arguments.model)
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    return model.to(arguments.device).eval()


if __name__ == "__main__":
    run_peer(TransformersStatic)
