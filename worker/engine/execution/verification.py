"""Which guesses of a step came true, found in waves (decision 0083).

The forward has given logits behind the last known token of a request and behind each of its guesses. Every request gets
its next token as without guesses. Those whose guess it was get a further one, from the logits behind that guess, and so
on: a wave is one call of the sampler for all that are left. Between two waves the tokens are noted as between two
steps, so penalties, rules and grammars see what they would have seen, and nothing is ever taken back.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ....shared.messages.outcome import TokenLogprobs
from ..core.step_input import IntArray, StepInput
from ..scheduling.request import Request
from ..scheduling.scheduler_output import SampledTokens


class Verification:
    """Follows the guesses of one step.

    A wave is the indices ``[W]`` of its requests among those that ``step`` samples.

    Args:
        requests: of the batch, in the scheduler's order.
        sampled: has the first token of each. Tokens and log probabilities of the waves are added to it.
    """

    def __init__(self, step: StepInput, requests: list[Request], sampled: SampledTokens) -> None:
        assert step.num_guesses is not None
        assert step.first_logits is not None
        self._step, self._requests, self._sampled = step, requests, sampled
        self._num_guesses, self._first_logits = step.num_guesses, step.first_logits
        self._num_known_tokens = step.num_known_tokens
        self._places = step.order[step.sampled]
        self._wave = np.arange(len(step.sampled))
        self._number = 0

    def next_wave(self) -> IntArray:
        """Return who may have a further token: the last one of each was guessed, and has not ended its grammar."""
        self._wave = np.array([i for i in self._wave.tolist() if self._goes_on(i)], np.int64)
        self._number += 1
        return self._wave

    def logits_of(self, wave: IntArray) -> IntArray:
        """``[W]``, where in the step's logits those for the wave's tokens are."""
        return self._first_logits[wave] + self._number

    def rows_of(self, wave: IntArray) -> tuple[IntArray, IntArray]:
        """``[W]`` rows of the ``InputBatch``, and how many tokens each has now."""
        return self._step.rows[self._step.sampled[wave]], self._num_known_tokens[wave] + self._number

    def take(self, wave: IntArray, token_ids: IntArray, logprobs: Mapping[int, TokenLogprobs]) -> None:
        """Add the tokens of ``wave``, ``[W]``, and by index in it what is told of them."""
        places = self._places[wave].tolist()
        for place, token_id in zip(places, token_ids.tolist(), strict=True):
            self._sampled.token_ids[place].append(token_id)
        for index, told in logprobs.items():
            self._sampled.logprobs[self._requests[places[index]].request_id].append(told)

    def _goes_on(self, index: int) -> bool:
        if self._number >= self._num_guesses[index]:
            return False
        place = self._places[index]
        behind = self._step.logit_rows[self._first_logits[index] + self._number] + 1
        if self._step.token_ids[behind] != self._sampled.token_ids[place][-1]:
            return False
        constraint = self._requests[place].constraint
        return constraint is None or not (constraint.is_terminated or constraint.failure is not None)
