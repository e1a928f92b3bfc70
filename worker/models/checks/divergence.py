"""How far predictions of a text are from those of a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Smallest number that the reference's log probabilities are stored with. A token with a smaller one has probability 0,
# and minus infinity would make its share of the divergence NaN.
_MIN_LOGPROB = -60_000.0
# Random weights may be so sure of another token that the perplexity is no float.
_LARGEST_EXPONENT = 700.0


@dataclass
class Scores:
    """Sums over the scored tokens of a text, in nats."""

    num_tokens: int = 0
    surprise: float = 0.0
    divergence: float = 0.0
    num_agreed: int = 0

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.surprise / self.num_tokens, _LARGEST_EXPONENT))

    @property
    def kl(self) -> float:
        """Mean Kullback-Leibler divergence from the reference's next-token distribution, in nats per token."""
        return self.divergence / self.num_tokens

    @property
    def agreement(self) -> float:
        """Share of tokens at which the most probable next token is the reference's."""
        return self.num_agreed / self.num_tokens

    def add_reference(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Add the reference's ``logits [N, V]`` before tokens ``[N]``; return its log probabilities, in 16 bits."""
        logprobs = _log_softmax(logits)
        self._add_surprise(logprobs, token_ids)
        self.num_agreed += len(logits)
        return logprobs.half()

    def add(self, logits: Tensor, token_ids: Tensor, reference: Tensor) -> None:
        """Add ``logits [N, V]`` before tokens ``[N]``, for which ``add_reference`` returned ``reference``.

        The rounding of ``reference`` changes the divergence by less than 1e-5.
        """
        logprobs, reference = _log_softmax(logits), reference.float()
        self._add_surprise(logprobs, token_ids)
        self.divergence += _sum_divergence(reference, logprobs)
        self.num_agreed += int((reference.argmax(-1) == logprobs.argmax(-1)).sum())

    def _add_surprise(self, logprobs: Tensor, token_ids: Tensor) -> None:
        self.num_tokens += len(token_ids)
        self.surprise -= float(logprobs.gather(1, token_ids[:, None]).sum(dtype=torch.float64))


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
