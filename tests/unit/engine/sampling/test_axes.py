"""Positions in three axes: an image's from its patches, those after it behind the longer side."""

from __future__ import annotations

import numpy as np

from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.core.step_input import IntArray, StepInput
from penstock.worker.engine.execution.input_tables import AxesTable
from penstock.worker.engine.scheduling.prompt_inputs import ImageSpan
from penstock.worker.engine.scheduling.request import Request

# Two rows and three columns of patches.
GRID = np.array([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]])
# Two words, the image, two words, which continue behind its three columns; and the generated tokens.
WHOLE = [
    [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
    [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
    [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
]


def request(*images: ImageSpan) -> Request:
    return Request("r", [1] * 10, SamplingParams(), max_model_len=20, images=images)


def step(rows: list[int], seq_lens: list[int], query_lens: list[int]) -> StepInput:
    def array(values: list[int]) -> IntArray:
        return np.array(values, np.int64)

    positions = [at for end, num in zip(seq_lens, query_lens, strict=True) for at in range(end - num, end)]
    nothing = array([])
    return StepInput(
        order=array(list(range(len(rows)))),
        rows=array(rows),
        token_ids=array([1] * len(positions)),
        positions=array(positions),
        slot_mapping=array([0] * len(positions)),
        query_lens=array(query_lens),
        seq_lens=array(seq_lens),
        logit_rows=nothing,
        sampled=nothing,
    )


def taken(table: AxesTable, step_input: StepInput) -> list[list[int]]:
    axes = table.select(step_input)
    assert axes is not None
    return axes.tolist()


def test_positions_follow_the_grid_in_chunks_and_beyond_the_prompt() -> None:
    table = AxesTable()
    table.set_row(2, request(ImageSpan(2, 8, list(range(2, 8)), b"a", None, GRID)))
    assert taken(table, step([2], [12], [12])) == WHOLE
    # Chunks that end inside of the image and behind the prompt; and, next to them, a request of text alone.
    assert taken(table, step([2], [5], [5])) == [axis[:5] for axis in WHOLE]
    assert taken(table, step([7, 2], [3, 11], [2, 6])) == [[1, 2, *axis[5:11]] for axis in WHOLE]
    assert taken(table, step([2], [12], [1])) == [[8], [8], [8]]


def test_requests_without_images_have_no_image_axes() -> None:
    table = AxesTable()
    table.set_row(0, request())
    table.set_row(1, request(ImageSpan(2, 8, list(range(2, 8)), b"a", None)))
    assert table.select(step([0, 1], [4, 4], [4, 4])) is None
    table.set_row(1, request(ImageSpan(2, 8, list(range(2, 8)), b"a", None, GRID)))
    assert table.select(step([0], [4], [4])) is None
    assert table.select(step([0, 1], [4, 4], [4, 4])) is not None
    table.forget_row(1)
    assert table.select(step([0, 1], [4, 4], [4, 4])) is None
