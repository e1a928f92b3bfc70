"""Log probabilities of sampled tokens, of the most probable alternatives, and of prompt tokens.

They come from the model's logits before sampling parameters change them (vLLM's "raw_logprobs").

For ``prompt_logprobs`` all tokens of a prompt except its last need logits. The logits of token ``i - 1`` score token
``i`` of a prompt. A request collects the results in ``Request.prompt_logprobs``, chunk by chunk, and delivers them with
its first output token. If it is preempted before, it continues after the tokens already scored; if another engine
resumes it after its first token, it has delivered them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....shared.messages.outcome import TokenLogprobs
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


NO_LOGPROBS = -1
# Floats that are processed at a time for prompt log probabilities: 32 MiB.
_PIECE_ELEMENTS = 1 << 23


@dataclass
class RawLogprobs:
    """Log probabilities of the ``L`` rows that request them, computed before the sampler changes the logits.

    Args:
        rows: ``[L]``, indices among the step's rows.
        num_top: ``[L]``, number of alternatives that each requests.
        values: ``[L, V]`` float32.
    """

    rows: NDArray[np.int64]
    num_top: NDArray[np.int64]
    values: Tensor

    @classmethod
    def of(cls, logits: Tensor, num_logprobs: NDArray[np.int64]) -> RawLogprobs:
        """Compute from logits ``[R, V]`` of any float dtype, which stay unchanged; ``num_logprobs`` as in
        ``SamplingRows``.
        """
        rows = np.nonzero(num_logprobs != NO_LOGPROBS)[0]
        row_logits = logits if len(rows) == len(logits) else logits[torch.from_numpy(rows).to(logits.device)]
        values = torch.log_softmax(row_logits, dim=-1, dtype=torch.float32)
        return cls(rows, np.minimum(num_logprobs[rows], logits.shape[1]), values)

    def at(self, token_ids: Tensor) -> dict[int, TokenLogprobs]:
        """Return the log probabilities of the sampled ``token_ids``, ``[R]``, and of alternatives, by row."""
        sampled_ids = token_ids[torch.from_numpy(self.rows).to(token_ids.device)]
        logprobs = self.values.gather(1, sampled_ids[:, None])
        ranks = (self.values > logprobs).sum(dim=-1) + 1
        top_logprobs, top_ids = self.values.topk(int(self.num_top.max()), dim=-1)
        columns = (sampled_ids, logprobs[:, 0], ranks, top_ids, top_logprobs)
        per_row = zip(self.rows.tolist(), self.num_top.tolist(), *(column.tolist() for column in columns), strict=True)
        return {
            row: TokenLogprobs(token_id, logprob, rank, list(zip(ids[:num_top], values[:num_top], strict=True)))
            for row, num_top, token_id, logprob, rank, ids, values in per_row
        }


def prompt_logprobs_of(logits: Tensor, rows: PromptRows, *, one_by_one: bool = False) -> dict[str, list[TokenLogprobs]]:
    """Return the log probabilities of prompt tokens, by request_id, from ``logits``, ``[P, V]`` of any float dtype.

    Args:
        one_by_one: process each row separately, so that its bits do not depend on the others.
    """
    size = 1 if one_by_one else max(1, _PIECE_ELEMENTS // logits.shape[1])
    logprobs: list[TokenLogprobs] = []
    for start in range(0, len(logits), size):
        # A copy of a single row begins at aligned memory, wherever the row was among the others.
        piece = logits[start : start + size].clone() if one_by_one else logits[start : start + size]
        raw = RawLogprobs.of(piece, rows.num_logprobs[start : start + size])
        token_ids = torch.from_numpy(rows.token_ids[start : start + size]).to(logits.device)
        logprobs += raw.at(token_ids).values()
    ends = np.cumsum(list(rows.counts.values())).tolist()
    return {
        request_id: logprobs[end - count : end]
        for (request_id, count), end in zip(rows.counts.items(), ends, strict=True)
    }
