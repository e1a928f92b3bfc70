"""Measures how far a number format moves a model's predictions of a text.

The text is cut into windows. An engine computes each window as a prompt with ``prompt_logprobs``, so the model, its
kernels and its KV cache are those that serve requests. The logits of all tokens are compared with those of a reference
engine over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ...models.checks.divergence import Scores
from ...text.tokenizer import TextCodec
from ..composition import Engine
from ..sampling.logprobs import PromptRows
from .run import OfflineRequest, run_workload

# Floats that are compared at a time: 32 MiB.
_PIECE_ELEMENTS = 1 << 23
# Called with the index of a window, and logits ``[N, V]`` and ids ``[N]`` of its next N scored tokens.
TakeLogits = Callable[[int, Tensor, Tensor], None]


def cut_windows(codec: TextCodec, text: str, size: int) -> list[list[int]]:
    """Return the tokens of ``text`` in windows of at most ``size``, each after the special tokens of a prompt."""
    prompt, plain = codec.encode(text), codec.encode(text, add_special_tokens=False)
    begins = range(len(prompt) - len(plain) + 1)
    begin = next((at for at in begins if prompt[at : at + len(plain)] == plain), 0)
    prefix = prompt[:begin]
    step = size - len(prefix)
    windows = [prefix + plain[at : at + step] for at in range(0, len(plain), step)]
    # A window of one token has nothing to score.
    return [window for window in windows if len(window) > 1]


class QualityMeter:
    """Compares engines with a reference engine on the same windows.

    It keeps the reference's log probabilities, in 16 bits, so that only one engine is in memory at a time.
    """

    def __init__(self, windows: list[list[int]]) -> None:
        self._windows = windows
        self._reference: list[list[Tensor]] = [[] for _ in windows]

    @property
    def num_windows(self) -> int:
        return len(self._windows)

    @property
    def num_tokens(self) -> int:
        """Number of scored tokens: all but the first of each window."""
        return sum(map(len, self._windows)) - len(self._windows)

    def measure_reference(self, engine: Engine) -> Scores:
        """Store the predictions of the reference, and return its scores."""
        scores = Scores()

        def store_logits(window: int, logits: Tensor, token_ids: Tensor) -> None:
            self._reference[window].append(scores.add_reference(logits, token_ids))

        self._score(engine, store_logits)
        return scores

    def compare(self, engine: Engine) -> Scores:
        """Return the scores of another engine against the reference, which must have been measured."""
        scores = Scores()
        references = [torch.cat(pieces) for pieces in self._reference]
        num_taken = [0] * len(references)

        def compare_logits(window: int, logits: Tensor, token_ids: Tensor) -> None:
            start = num_taken[window]
            num_taken[window] += len(logits)
            scores.add(logits, token_ids, references[window][start : start + len(logits)])

        self._score(engine, compare_logits)
        return scores

    def _score(self, engine: Engine, take: TakeLogits) -> None:
        score_prompts = engine.runner.score_prompts

        def pass_logits(logits: Tensor, rows: PromptRows) -> dict:
            for piece in _pieces(logits, rows):
                take(*piece)
            return score_prompts(logits, rows)

        engine.runner.score_prompts = pass_logits
        params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
        run_workload(engine.core, [OfflineRequest(window, params) for window in self._windows], 0.0, concurrency=1)


def _pieces(logits: Tensor, rows: PromptRows) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the arguments of ``TakeLogits`` in pieces; the id of a request is the index of its window."""
    size, begin = max(1, _PIECE_ELEMENTS // logits.shape[1]), 0
    for request_id, count in rows.counts.items():
        for start in range(begin, begin + count, size):
            piece = slice(start, min(start + size, begin + count))
            yield int(request_id), logits[piece], torch.from_numpy(np.asarray(rows.token_ids[piece]))
        begin += count
