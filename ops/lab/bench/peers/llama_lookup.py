# pyright: reportMissingImports=false
# (llama-cpp-python is installed in an environment of its own.)
"""llama.cpp, one request after the other, with the prompt lookup of its Python package if drafts are wanted.

The package has the drafts of ``LlamaPromptLookupDecoding``; they are verified here by llama.cpp's own batch calls, as
those of ``LlamaBatch``, since the package's ``Llama`` spends more time on a token in Python than a small model takes.
"""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np
from llama_batch import MAX_BATCH_TOKENS, LlamaBatch
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from peer_run import Arguments, Request, run_peer


class LlamaLookup(LlamaBatch):
    """Peer whose steps compute the last token and the draft tokens after it."""

    def __init__(self, arguments: Arguments, workload: dict[str, Any]) -> None:
        super().__init__(arguments, workload)
        self._drafter = None
        if arguments.num_guesses:
            self._drafter = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=arguments.num_guesses)

    def run(self, requests: list[Request], concurrency: int) -> None:
        del concurrency
        for request in requests:
            request.await_arrival()
            request.sent()
            context = self._open_context(1)
            batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
            try:
                self._generate_one(context, batch, request)
            finally:
                llama_cpp.llama_batch_free(batch)
                llama_cpp.llama_free(context)

    def _generate_one(self, context: Any, batch: Any, request: Request) -> None:
        sequence = list(request.prompt_token_ids)
        self._decode(context, batch, sequence, 0, num_logits=1)
        while True:
            # Rows of the last batch: after the last token and after each draft token.
            num_rows = 1 + len(sequence) - len(request.prompt_token_ids) - len(request.output_token_ids)
            drafts = sequence[len(sequence) - num_rows + 1 :]
            accepted = []
            for row in range(num_rows):
                accepted.append(self.argmax(context, batch.n_tokens - num_rows + row))
                if row == len(drafts) or accepted[-1] != drafts[row]:
                    break
            accepted = accepted[: request.max_tokens - len(request.output_token_ids)]
            request.saw(accepted)
            if request.is_complete:
                return
            sequence = request.prompt_token_ids + request.output_token_ids
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, len(sequence) - 1, -1)
            start, num_left = len(sequence) - 1, request.max_tokens - len(request.output_token_ids) - 1
            if self._drafter is not None and num_left:
                sequence += self._drafter(np.array(sequence, np.intc))[:num_left].tolist()
            self._decode(context, batch, sequence[start:], start, num_logits=len(sequence) - start)

    def _decode(self, context: Any, batch: Any, token_ids: list[int], start: int, *, num_logits: int) -> None:
        """Compute ``token_ids``, of which the last ``num_logits`` give logits."""
        for row, token_id in enumerate(token_ids):
            batch.token[row] = token_id
            batch.pos[row] = start + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = row >= len(token_ids) - num_logits
        batch.n_tokens = len(token_ids)
        status = llama_cpp.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")


if __name__ == "__main__":
    run_peer(LlamaLookup)
