"""Cut a step into forwards in which no two requests share a row, for models in which a row is one sequence.

Decodes are batched, ``[B, 1]``; every other request is computed alone, ``[1, T]``. A request's first chunk is like any
prompt. It depends on the model whether a later chunk can be computed in one forward, and whether decodes may have
different lengths. ``checks/conformance.py`` tries it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.paged_attention import PagedBatch


@dataclass(frozen=True)
class CutRule:
    """The abilities of a model.

    Args:
        continues_chunks: it computes several tokens that follow a state in one forward. Else they are computed one by
            one.
        batches_decodes: it computes decodes of different lengths together. Else they are computed one by one.
        max_padded_tokens: most tokens, present and past, of a batch of decodes padded to the longest; None for no
            limit.
    """

    continues_chunks: bool = True
    batches_decodes: bool = True
    max_padded_tokens: int | None = None


@dataclass
class Part:
    """A forward.

    Args:
        rows: indices into the step's batch, ``[B]``.
        tokens: indices of the step's tokens, ``[B * query_len]``; those of a row are contiguous.
        query_len: tokens of each row; 1 if there are several rows.
        seq_lens: tokens of each row after this forward.
    """

    rows: Sequence[int]
    tokens: Sequence[int]
    query_len: int
    seq_lens: list[int]

    def batch_of(self, step: PagedBatch) -> PagedBatch:
        """Return the part of ``step`` that this forward computes."""
        if len(self.tokens) == step.num_tokens:
            return step
        return PagedBatch(
            take(step.block_table, self.rows),
            take(step.slot_mapping, self.tokens),
            [self.query_len] * len(self.rows),
            self.seq_lens,
            step.block_size,
        )


@dataclass
class Piece:
    """Consecutive forwards on the states of the same requests.

    Args:
        is_fresh: it begins with the first token of its only request, which has no state yet.
    """

    rows: Sequence[int]
    parts: list[Part]
    is_fresh: bool


def cut(batch: PagedBatch, rule: CutRule) -> Iterator[Piece]:
    """Yield the pieces of a step. Decodes, whose rows come first in ``batch``, have as many tokens as rows."""
    decodes = [row for row in range(batch.num_decodes) if batch.seq_lens[row] > 1]
    if rule.batches_decodes and decodes:
        for rows in _groups(decodes, batch.seq_lens, rule.max_padded_tokens):
            part = Part(rows, rows, 1, [batch.seq_lens[row] for row in rows])
            yield Piece(rows, [part], is_fresh=False)
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        is_fresh = query_len == seq_len
        is_decode = query_len == 1 and not is_fresh
        if not (is_decode and rule.batches_decodes):
            chunk_len = query_len if is_fresh or rule.continues_chunks else 1
            yield Piece([row], list(_chunks(row, start, query_len, seq_len, chunk_len)), is_fresh)
        start += query_len


def take(tensor: Tensor, places: Sequence[int]) -> Tensor:
    """Return ``tensor`` at the ascending indices ``places`` of its first dimension; a view if they are consecutive."""
    if places[-1] - places[0] + 1 == len(places):
        return tensor[places[0] : places[-1] + 1]
    return tensor[torch.tensor(places, device=tensor.device)]


def _groups(decodes: list[int], seq_lens: list[int], max_padded_tokens: int | None) -> Iterator[list[int]]:
    """Yield ``decodes`` in order, in groups of at most ``max_padded_tokens``, or of a single row that has more."""
    group: list[int] = []
    longest = 0
    for row in decodes:
        longest = max(longest, seq_lens[row])
        if group and max_padded_tokens is not None and longest * (len(group) + 1) > max_padded_tokens:
            yield group
            group, longest = [], seq_lens[row]
        group.append(row)
    yield group


def _chunks(row: int, start: int, query_len: int, seq_len: int, chunk_len: int) -> Iterator[Part]:
    """Yield forwards of ``chunk_len`` tokens each, for the ``query_len`` tokens from ``start`` on."""
    for offset in range(0, query_len, chunk_len):
        tokens = range(start + offset, start + offset + chunk_len)
        yield Part([row], tokens, chunk_len, [seq_len - query_len + offset + chunk_len])
