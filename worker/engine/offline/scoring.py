"""Measures how far a number format moves a model's predictions of a text.

The text is cut into windows. An engine computes each window as a prompt with ``prompt_logprobs``, so the model, its
kernels and its KV cache are those that serve requests. The logits of all tokens are compared with those of a reference
engine over the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...text.tokenizer import TextCodec
from ..composition import Engine
from ..sampling.logprobs import PromptRows
from .run import OfflineRequest, run_workload

# Floats that are compared at a time: 32 MiB.
_PIECE_ELEMENTS = 1 << 23
# Smallest number that the reference's log probabilities are stored with. A token with a smaller one has probability 0,
# and minus infinity would make its share of the divergence NaN.
_MIN_LOGPROB = -60_000.0

# Called with the index of a window, and logits ``[N, V]`` and ids ``[N]`` of its next N scored tokens.
TakeLogits = Callable[[int, Tensor, Tensor], None]


@dataclass
class Scores:
    """Sums over the scored tokens of a text, in nats."""

    num_tokens: int = 0
    surprise: float = 0.0
    divergence: float = 0.0
    num_agreed: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.num_tokens)

    @property
    def kl(self) -> float:
        """Mean Kullback-Leibler divergence from the reference's next-token distribution, in nats per token."""
        return self.divergence / self.num_tokens

    @property
    def agreement(self) -> float:
        """Share of tokens at which the most probable next token is the reference's."""
        return self.num_agreed / self.num_tokens


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

    It keeps the reference's log probabilities, in 16 bits, so that only one engine is in memory at a time. The rounding
    changes the divergence by less than 1e-5.
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
            logprobs = _log_softmax(logits)
            _add_surprise(scores, logprobs, token_ids)
            scores.num_agreed += len(logits)
            self._reference[window].append(logprobs.half())

        self._score(engine, store_logits)
        return scores

    def compare(self, engine: Engine) -> Scores:
        """Return the scores of another engine against the reference, which must have been measured."""
        scores = Scores()
        references = [torch.cat(pieces) for pieces in self._reference]
        num_taken = [0] * len(references)

        def compare_logits(window: int, logits: Tensor, token_ids: Tensor) -> None:
            logprobs, start = _log_softmax(logits), num_taken[window]
            num_taken[window] += len(logits)
            reference = references[window][start : start + len(logits)].float()
            _add_surprise(scores, logprobs, token_ids)
            scores.divergence += _sum_divergence(reference, logprobs)
            scores.num_agreed += int((reference.argmax(-1) == logprobs.argmax(-1)).sum())

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


def _log_softmax(logits: Tensor) -> Tensor:
    """Return finite log probabilities of ``logits [N, V]``, in float32 on the CPU."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32).clamp_min(_MIN_LOGPROB).cpu()


def _sum_divergence(reference: Tensor, logprobs: Tensor) -> float:
    """Return the sum of the divergences of ``logprobs [N, V]`` from those of the reference, which have been rounded.

    Rounding leaves the reference's probabilities with a sum other than 1. The last two terms remove the first-order
    effect of that, and are 0 without rounding.
    """
    probabilities = reference.exp()
    terms = probabilities * (reference - logprobs) - probabilities + logprobs.exp()
    return float(terms.sum(dtype=torch.float64))


def _add_surprise(scores: Scores, logprobs: Tensor, token_ids: Tensor) -> None:
    scores.num_tokens += len(token_ids)
    scores.surprise -= float(logprobs.gather(1, token_ids[:, None]).sum(dtype=torch.float64))
