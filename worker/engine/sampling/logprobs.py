"""Log probabilities of sampled tokens and of their best alternatives, for the requests that ask.

They are the model's own: from the logits before anything that sampling parameters change (vLLM's "raw_logprobs").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....shared.messages.outcome import TokenLogprobs
from .prompt_rows import PromptRows
from .sampling_table import NO_LOGPROBS

# As many floats are worked on at a time where many rows want log probabilities: 32 MiB.
_PIECE_ELEMENTS = 1 << 23


@dataclass
class RawLogprobs:
    """The distributions of the ``L`` rows that ask, taken before the sampler changes the logits.

    Args:
        rows: ``[L]``, their index among the step's rows.
        num_top: ``[L]``, how many alternatives each asks for.
        values: ``[L, V]`` float32.
    """

    rows: NDArray[np.int64]
    num_top: NDArray[np.int64]
    values: Tensor

    @classmethod
    def of(cls, logits: Tensor, num_logprobs: NDArray[np.int64]) -> RawLogprobs:
        """From logits ``[R, V]`` of any float dtype, left as they are; ``num_logprobs`` as in ``SamplingRows``."""
        asking = np.nonzero(num_logprobs != NO_LOGPROBS)[0]
        chosen = logits if len(asking) == len(logits) else logits[torch.from_numpy(asking).to(logits.device)]
        values = torch.log_softmax(chosen, dim=-1, dtype=torch.float32)
        return cls(asking, np.minimum(num_logprobs[asking], logits.shape[1]), values)

    def at(self, token_ids: Tensor) -> dict[int, TokenLogprobs]:
        """What to tell of the sampled ``token_ids``, ``[R]``, by row."""
        sampled_ids = token_ids[torch.from_numpy(self.rows).to(token_ids.device)]
        logprobs = self.values.gather(1, sampled_ids[:, None])
        ranks = (self.values > logprobs).sum(dim=-1) + 1
        top_logprobs, top_ids = self.values.topk(int(self.num_top.max()), dim=-1)
        columns = (sampled_ids, logprobs[:, 0], ranks, top_ids, top_logprobs)
        told = zip(self.rows.tolist(), self.num_top.tolist(), *(column.tolist() for column in columns), strict=True)
        return {
            row: TokenLogprobs(token_id, logprob, rank, list(zip(ids[:num_top], values[:num_top], strict=True)))
            for row, num_top, token_id, logprob, rank, ids, values in told
        }


def prompt_logprobs_of(logits: Tensor, rows: PromptRows, *, one_by_one: bool = False) -> dict[str, list[TokenLogprobs]]:
    """What to tell of the prompt tokens that ``logits``, ``[P, V]`` of any float dtype, judge; by request_id.

    Args:
        one_by_one: work on each row by itself, so that its bits do not depend on the others.
    """
    size = 1 if one_by_one else max(1, _PIECE_ELEMENTS // logits.shape[1])
    told: list[TokenLogprobs] = []
    for start in range(0, len(logits), size):
        # A copy of a single row begins where memory is aligned, wherever the row was among the others.
        piece = logits[start : start + size].clone() if one_by_one else logits[start : start + size]
        raw = RawLogprobs.of(piece, rows.num_logprobs[start : start + size])
        token_ids = torch.from_numpy(rows.token_ids[start : start + size]).to(logits.device)
        told += raw.at(token_ids).values()
    ends = np.cumsum(list(rows.counts.values())).tolist()
    return {
        request_id: told[end - count : end] for (request_id, count), end in zip(rows.counts.items(), ends, strict=True)
    }
