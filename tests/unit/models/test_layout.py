"""The place of each rank, and its layers."""

from __future__ import annotations

from itertools import chain

from penstock.worker.models.parallel.layout import ParallelLayout


def test_every_rank_has_one_place() -> None:
    layout = ParallelLayout(tensor=2, pipeline=3)
    assert layout.world_size == 6
    assert layout.tensor_groups == ((0, 1), (2, 3), (4, 5))
    assert layout.pipeline_chains == ((0, 2, 4), (1, 3, 5))
    for rank in range(layout.world_size):
        assert layout.rank_at(layout.pipeline_rank(rank), layout.tensor_rank(rank)) == rank
        assert rank in layout.tensor_groups[layout.pipeline_rank(rank)]
        assert rank in layout.pipeline_chains[layout.tensor_rank(rank)]


def test_stages_have_all_layers_once_and_in_order() -> None:
    layout = ParallelLayout(tensor=2, pipeline=3)
    parts = [layout.stage_layers(chain_of_ranks, 7) for chain_of_ranks in layout.pipeline_chains[1]]
    assert list(chain.from_iterable(parts)) == list(range(7))
    assert {len(part) for part in parts} == {2, 3}


def test_one_rank_has_all() -> None:
    assert ParallelLayout().world_size == 1
    assert ParallelLayout().stage_layers(0, 5) == range(5)
