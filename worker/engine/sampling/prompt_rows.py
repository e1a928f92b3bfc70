"""Selects the tokens of a step that need logits for ``prompt_logprobs``: all tokens of a prompt except its last.

The logits of token ``i - 1`` score token ``i`` of a prompt. A request collects the results in
``Request.prompt_logprobs``, chunk by chunk, and delivers them with its first output token. If it is preempted before,
it continues after the tokens already scored; if another engine resumes it after its first token, it has delivered them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.step_input import StepInput
from ..scheduling.request import Request


@dataclass
class PromptRows:
    """The ``P`` tokens of a step with logits that score the next token of a prompt.

    Args:
        logit_rows: ``[P]`` ascending, indices of packed tokens.
        token_ids: ``[P]``, the tokens to score.
        num_logprobs: ``[P]``, number of alternatives for each.
        counts: number of these tokens per request_id, in order.
    """

    logit_rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    num_logprobs: NDArray[np.int64]
    counts: dict[str, int]


class PromptRowTable:
    """Rows of the batch with ``prompt_logprobs``."""

    def __init__(self) -> None:
        # Usually empty, since few requests set ``prompt_logprobs``.
        self._rows: dict[int, Request] = {}

    def set_row(self, row: int, request: Request) -> None:
        """Store ``request`` in ``row``, if it has prompt log probabilities to deliver."""
        if request.prompt_logprobs is not None:
            self._rows[row] = request

    def forget_row(self, row: int) -> None:
        """Drop ``row``, if it is stored."""
        self._rows.pop(row, None)

    def select(self, step: StepInput) -> PromptRows | None:
        """Return the prompt tokens that ``step`` scores; None if it scores none."""
        if not self._rows:
            return None
        scored: list[tuple[Request, int, range]] = []
        ends = np.cumsum(step.query_lens).tolist()
        for row, end, num_tokens, num_new_tokens in zip(
            step.rows.tolist(), ends, step.seq_lens.tolist(), step.query_lens.tolist(), strict=True
        ):
            request = self._rows.get(row)
            if request is None:
                continue
            if request.prompt_logprobs is None:
                del self._rows[row]
                continue
            start = max(num_tokens - num_new_tokens, len(request.prompt_logprobs))
            positions = range(start, min(num_tokens, request.num_prompt_tokens - 1))
            if positions:
                scored.append((request, end - num_tokens, positions))
        if not scored:
            return None
        counts = {request.request_id: len(positions) for request, _, positions in scored}
        scored_ids = [request.token_ids[positions.start + 1 : positions.stop + 1] for request, _, positions in scored]
        num_logprobs = [request.params.prompt_logprobs or 0 for request, _, _ in scored]
        return PromptRows(
            logit_rows=np.concatenate([np.array(positions) + offset for _, offset, positions in scored]),
            token_ids=np.concatenate([np.array(token_ids) for token_ids in scored_ids]),
            num_logprobs=np.repeat(num_logprobs, list(counts.values())),
            counts=counts,
        )
