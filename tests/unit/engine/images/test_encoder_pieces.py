"""Cuts of a step's texts into pieces for threads."""

from __future__ import annotations

import random

import pytest

from penstock.worker.models.pooling.compiled_encoder import cut_pieces


@pytest.mark.parametrize(
    ("lens", "num_threads", "expected"),
    [
        ([5], 1, [[5]]),
        ([5], 4, [[5]]),
        ([30, 30], 2, [[30], [30]]),
        ([10, 20, 30], 2, [[10, 20], [30]]),
        ([400, 10], 2, [[400], [10]]),
        ([300, 300, 300, 300], 1, [[300], [300, 300], [300]]),
        ([2000, 1], 2, [[2000], [1]]),
    ],
)
def test_texts_are_cut_where_a_piece_should_end(lens: list[int], num_threads: int, expected: list[list[int]]) -> None:
    assert [piece.lens.tolist() for piece in cut_pieces(lens, num_threads)] == expected


def test_pieces_have_every_text_once_and_in_order() -> None:
    drawn = random.Random(3)
    for _ in range(300):
        lens = [drawn.randint(1, drawn.choice([8, 64, 700])) for _ in range(drawn.randint(1, 40))]
        pieces = cut_pieces(lens, drawn.randint(1, 5))
        assert [length for piece in pieces for length in piece.lens] == lens
        assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == sum(lens)
        assert all(len(piece) for piece in pieces)
