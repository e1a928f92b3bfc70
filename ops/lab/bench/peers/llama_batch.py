# pyright: reportMissingImports=false
# (llama-cpp-python is installed in an environment of its own.)
"""llama.cpp through its own batch calls: prompts and next tokens of many sequences in one batch, the argmax by numpy.

With ``--file-type`` its own quantiser has made bytes or four bits of the weights. A context per phase, with a key-value
cache of its own for each sequence, which was the faster way with many of them.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from importlib import metadata
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf_model import write_gguf
from peer_run import Arguments, Arrivals, Request, run_peer

MAX_BATCH_TOKENS = 512
SLOT_TOKENS = 512


class LlamaBatch:
    """The converted model, mapped into memory. The first start converts it: that of the check, which is not timed."""

    def __init__(self, arguments: Arguments, workload: dict[str, Any]) -> None:
        del workload
        self.versions = {name: metadata.version(name) for name in ("llama-cpp-python", "gguf")}
        self._threads = arguments.threads
        self._dtype = arguments.dtype
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        path = _convert(arguments)
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def run(self, requests: list[Request], concurrency: int) -> None:
        context = self._open_context(concurrency)
        batch = llama_cpp.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
        try:
            _Batching(self, context, batch, requests, concurrency).run()
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)

    def argmax(self, context: Any, row: int) -> int:
        """Return the most likely token after the batch's token in ``row``."""
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def pids(self) -> list[int]:
        return [os.getpid()]

    def close(self) -> None:
        llama_cpp.llama_model_free(self._model)

    def _open_context(self, num_sequences: int) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = SLOT_TOKENS * num_sequences
        parameters.n_seq_max = num_sequences
        parameters.n_batch = parameters.n_ubatch = MAX_BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.kv_unified = num_sequences == 1
        if self._dtype == "float32":
            parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
            parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to float16 inside
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError("llama.cpp could not make a context")
        return context


def _convert(arguments: Arguments) -> Path:
    """Return the file, which is made if it is not there."""
    stem = arguments.workload.parent / arguments.model.name
    plain = stem.with_name(f"{stem.name}-{arguments.dtype}.gguf")
    quantized = stem.with_name(f"{stem.name}-{arguments.file_type}.gguf")
    path = quantized if arguments.file_type else plain
    if path.exists():
        return path
    if not plain.exists():
        write_gguf(arguments.model, plain, arguments.dtype)
    if arguments.file_type:
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{arguments.file_type}")
        parameters.nthread = arguments.threads
        status = llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), ctypes.byref(parameters))
        if status != 0:
            raise RuntimeError(f"llama.cpp could not make {arguments.file_type} of {plain}: {status}")
    return path


class _Batching:
    """State of one phase: each batch has a token of every running sequence, then whole prompts while they fit."""

    def __init__(self, peer: LlamaBatch, context: Any, batch: Any, requests: list[Request], concurrency: int) -> None:
        self._peer, self._context, self._batch = peer, context, batch
        self._arrivals = Arrivals(requests, concurrency)
        self._prompts: deque[int] = deque()
        self._free_slots = list(range(concurrency))[::-1]
        self._running: dict[int, Request] = {}

    def run(self) -> None:
        while self._arrivals or self._running:
            for request in self._arrivals.take(len(self._running)):
                self._prompts.append(self._free_slots.pop())
                self._running[self._prompts[-1]] = request
            self._batch.n_tokens = 0
            rows: list[tuple[int, int]] = []
            for slot, request in self._running.items():
                if not request.output_token_ids:
                    continue
                position = len(request.prompt_token_ids) + len(request.output_token_ids) - 1
                rows.append((slot, self._add_token(request.output_token_ids[-1], position, slot, wants_logits=True)))
            rows += self._add_prompts()
            status = llama_cpp.llama_decode(self._context, self._batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status}")
            for slot, row in rows:
                self._take_token(slot, self._peer.argmax(self._context, row))

    def _add_prompts(self) -> list[tuple[int, int]]:
        rows = []
        while self._prompts:
            slot = self._prompts[0]
            prompt = self._running[slot].prompt_token_ids
            if self._batch.n_tokens + len(prompt) > MAX_BATCH_TOKENS:
                break
            self._prompts.popleft()
            row = 0
            for position, token_id in enumerate(prompt):
                row = self._add_token(token_id, position, slot, wants_logits=position == len(prompt) - 1)
            rows.append((slot, row))
        return rows

    def _take_token(self, slot: int, token_id: int) -> None:
        request = self._running[slot]
        request.saw([token_id])
        if request.is_complete:
            del self._running[slot]
            self._free_slots.append(slot)
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), slot, -1, -1)

    def _add_token(self, token_id: int, position: int, slot: int, *, wants_logits: bool) -> int:
        row = self._batch.n_tokens
        self._batch.token[row] = token_id
        self._batch.pos[row] = position
        self._batch.n_seq_id[row] = 1
        self._batch.seq_id[row][0] = slot
        self._batch.logits[row] = wants_logits
        self._batch.n_tokens = row + 1
        return row


if __name__ == "__main__":
    run_peer(LlamaBatch)
