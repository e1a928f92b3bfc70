"""A drafter that knows the output of a request, and proposes it with mistakes."""

from __future__ import annotations

import random
from collections.abc import Mapping

from penstock.worker.engine.drafting.drafters import Drafter
from penstock.worker.engine.scheduling.request import Request


class Oracle:
    """Drafter of each request's known output: each token is right with a probability of ``share``.

    Args:
        outputs: by request_id, all its output tokens.
    """

    def __init__(self, outputs: Mapping[str, list[int]], share: float, vocab_size: int, seed: int = 0) -> None:
        self._outputs = outputs
        self._share = share
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    def __call__(self, request: Request) -> list[Drafter]:
        """Draft as ``drafter.make_drafters`` does."""
        return [self]

    def draft(self, request: Request, room: int) -> list[int]:
        """See ``drafter.Drafter``."""
        coming = self._outputs[request.request_id][request.num_output_tokens :][:room]
        return [t if self._rng.random() < self._share else self._rng.randrange(self._vocab_size) for t in coming]
