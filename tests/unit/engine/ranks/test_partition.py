"""Cuts of a step into forwards, for a model that keeps more than keys and values."""

from __future__ import annotations

import torch

from penstock.kernels.paged_attention import PagedBatch
from penstock.worker.models.modes.partition import CutRule, Part, cut, take

# Two decodes, a prompt of one token, another decode, a prompt, and the second chunk of one.
QUERY_LENS = [1, 1, 1, 1, 4, 3]
SEQ_LENS = [7, 30, 1, 9, 4, 8]


def batch() -> PagedBatch:
    num_tokens = sum(QUERY_LENS)
    return PagedBatch(
        torch.arange(6)[:, None] * 10 + torch.arange(8), torch.arange(num_tokens) + 100, QUERY_LENS, SEQ_LENS, 4
    )


def shapes(rule: CutRule) -> list[tuple[list[int], bool, list[tuple[list[int], int, list[int]]]]]:
    """Rows and freshness of each piece; tokens, query length and sequence lengths of its parts."""
    return [
        (
            list(piece.rows),
            piece.is_fresh,
            [(list(part.tokens), part.query_len, part.seq_lens) for part in piece.parts],
        )
        for piece in cut(batch(), rule)
    ]


def test_decodes_go_together_and_prompts_alone() -> None:
    assert shapes(CutRule()) == [
        ([0, 1, 3], False, [([0, 1, 3], 1, [7, 30, 9])]),
        ([2], True, [([2], 1, [1])]),
        ([4], True, [([4, 5, 6, 7], 4, [4])]),
        ([5], False, [([8, 9, 10], 3, [8])]),
    ]


def test_later_chunks_one_by_one_and_first_ones_at_once() -> None:
    pieces = shapes(CutRule(continues_chunks=False))
    assert pieces[2] == ([4], True, [([4, 5, 6, 7], 4, [4])])
    assert pieces[3] == ([5], False, [([8], 1, [6]), ([9], 1, [7]), ([10], 1, [8])])


def test_decodes_one_by_one() -> None:
    pieces = shapes(CutRule(batches_decodes=False))
    assert pieces[:2] == [([0], False, [([0], 1, [7])]), ([1], False, [([1], 1, [30])])]
    assert [rows for rows, _, _ in pieces] == [[0], [1], [2], [3], [4], [5]]


def test_padding_is_bounded() -> None:
    assert [rows for rows, _, _ in shapes(CutRule(max_padded_tokens=60))][:2] == [[0, 1], [3]]
    assert [rows for rows, _, _ in shapes(CutRule(max_padded_tokens=10))][:3] == [[0], [1], [3]]


def test_a_part_has_its_own_rows_and_slots() -> None:
    part = Part([0, 1, 3], [0, 1, 3], 1, [7, 30, 9]).batch_of(batch())
    assert part.block_table[:, 0].tolist() == [0, 10, 30]
    assert part.slot_mapping.tolist() == [100, 101, 103]
    assert (part.query_lens, part.seq_lens) == ([1, 1, 1], [7, 30, 9])
    chunk = Part([5], range(9, 10), 1, [7]).batch_of(batch())
    assert (chunk.block_table[0, 0].item(), chunk.slot_mapping.tolist()) == (50, [109])


def test_places_that_follow_each_other_are_a_view() -> None:
    tensor = torch.arange(10)
    assert take(tensor, range(3, 6)).data_ptr() == tensor[3:].data_ptr()
    assert take(tensor, [3, 5]).tolist() == [3, 5]
