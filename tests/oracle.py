"""A drafter that knows what a request will say, and says it with mistakes."""

from __future__ import annotations

import random
from collections.abc import Mapping

from penstock.worker.engine.drafting.drafters import Drafter
from penstock.worker.engine.scheduling.request import Request


class Oracle:
    """What drafts for each request: of the tokens that it will say, each is right with a probability of ``share``.

    Args:
        outputs: by request_id, all its output tokens.
    """

    def __init__(self, outputs: Mapping[str, list[int]], share: float, vocab_size: int, seed: int = 0) -> None:
        self._outputs = outputs
        self._share = share
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)

    def __call__(self, request: Request) -> list[Drafter]:
        """As ``drafter.make_drafters``."""
        return [self]

    def draft(self, request: Request, room: int) -> list[int]:
        """See ``drafter.Drafter``."""
        coming = self._outputs[request.request_id][request.num_output_tokens :][:room]
        return [t if self._rng.random() < self._share else self._rng.randrange(self._vocab_size) for t in coming]
