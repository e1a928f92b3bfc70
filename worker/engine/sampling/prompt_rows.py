"""Which tokens of a step need logits for ``prompt_logprobs``: those of a prompt but its last.

Token ``i`` of a prompt is judged by the logits of token ``i - 1``. A request collects what is known of its prompt in
``Request.prompt_logprobs``, chunk after chunk, and gives it out with its first output token. One that is preempted
before goes on where it was; one that an engine resumes after its first token has given it out already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.step_input import StepInput
from ..scheduling.request import Request


@dataclass
class PromptRows:
    """The ``P`` tokens of a step whose logits judge the next token of a prompt.

    Args:
        logit_rows: ``[P]`` ascending, packed tokens.
        token_ids: ``[P]``, the tokens they judge.
        num_logprobs: ``[P]``, how many alternatives each shall have.
        counts: how many of them belong to each request_id, in order.
    """

    logit_rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    num_logprobs: NDArray[np.int64]
    counts: dict[str, int]


class PromptRowTable:
    """Those rows of the batch whose requests want log probabilities of their prompts."""

    def __init__(self) -> None:
        # Most requests want none, and then this is empty.
        self._rows: dict[int, Request] = {}

    def set_row(self, row: int, request: Request) -> None:
        """Take up ``request`` in ``row``, if it has not been told yet."""
        if request.prompt_logprobs is not None:
            self._rows[row] = request

    def forget_row(self, row: int) -> None:
        """Drop ``row``, if it is here."""
        self._rows.pop(row, None)

    def take(self, step: StepInput) -> PromptRows | None:
        """What ``step`` shall tell; None if that is nothing."""
        if not self._rows:
            return None
        found: list[tuple[Request, int, range]] = []
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
                found.append((request, end - num_tokens, positions))
        if not found:
            return None
        counts = {request.request_id: len(positions) for request, _, positions in found}
        judged = [request.token_ids[positions.start + 1 : positions.stop + 1] for request, _, positions in found]
        num_logprobs = [request.params.prompt_logprobs or 0 for request, _, _ in found]
        return PromptRows(
            logit_rows=np.concatenate([np.array(positions) + offset for _, offset, positions in found]),
            token_ids=np.concatenate([np.array(token_ids) for token_ids in judged]),
            num_logprobs=np.repeat(num_logprobs, list(counts.values())),
            counts=counts,
        )
