"""Verifies the draft tokens of a step in waves (ops/decisions/speculation.md).

The forward returns logits after the last known token of a request and after each of its draft tokens. Every request
gets its next token as without drafts. If the token equals the draft token, the request gets a further one, from the
logits after that draft token, and so on. A wave is one call of the sampler for all requests that continue. Between two
waves the tokens are recorded as between two steps, so penalties, rules and grammars have the same state as without
drafts, and nothing is ever undone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ....shared.messages.outcome import TokenLogprobs
from ..core.step_input import IntArray, StepInput
from ..scheduling.request import Request
from ..scheduling.scheduler_output import SampledTokens


class Verification:
    """Verifies the draft tokens of one step.

    A wave is given by the indices ``[W]`` of its requests among the requests that ``step`` samples.

    Args:
        requests: requests of the batch, in the scheduler's order.
        sampled: holds the first token of each request. Tokens and log probabilities of the waves are added to it.
    """

    def __init__(self, step: StepInput, requests: list[Request], sampled: SampledTokens) -> None:
        assert step.num_drafts is not None
        assert step.first_logits is not None
        self._step, self._requests, self._sampled = step, requests, sampled
        self._num_drafts, self._first_logits = step.num_drafts, step.first_logits
        self._num_known_tokens = step.num_known_tokens
        self._places = step.order[step.sampled]
        self._wave = np.arange(len(step.sampled))
        self._number = 0

    def next_wave(self) -> IntArray:
        """Return the requests that get another token: their last one was drafted, and has not ended their grammar."""
        self._wave = np.array([i for i in self._wave.tolist() if self._continues(i)], np.int64)
        self._number += 1
        return self._wave

    def logits_of(self, wave: IntArray) -> IntArray:
        """Return the indices of the wave's logits among the step's logits, ``[W]``."""
        return self._first_logits[wave] + self._number

    def rows_of(self, wave: IntArray) -> tuple[IntArray, IntArray]:
        """Return the rows of the wave in the ``InputBatch``, and their current numbers of tokens, both ``[W]``."""
        return self._step.rows[self._step.sampled[wave]], self._num_known_tokens[wave] + self._number

    def add_wave(self, wave: IntArray, token_ids: IntArray, logprobs: Mapping[int, TokenLogprobs]) -> None:
        """Add the tokens of ``wave``, ``[W]``, and their log probabilities by index in ``wave``."""
        places = self._places[wave].tolist()
        for place, token_id in zip(places, token_ids.tolist(), strict=True):
            self._sampled.token_ids[place].append(token_id)
        for index, token_logprobs in logprobs.items():
            self._sampled.logprobs[self._requests[places[index]].request_id].append(token_logprobs)

    def _continues(self, index: int) -> bool:
        if self._number >= self._num_drafts[index]:
            return False
        place = self._places[index]
        next_input = self._step.logit_rows[self._first_logits[index] + self._number] + 1
        if self._step.token_ids[next_input] != self._sampled.token_ids[place][-1]:
            return False
        constraint = self._requests[place].constraint
        return constraint is None or not (constraint.is_terminated or constraint.failure is not None)
