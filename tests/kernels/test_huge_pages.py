"""Tensors that lie together in huge pages, tensors in small pages, and results in the memory of earlier ones."""

from __future__ import annotations

import psutil
import pytest
import torch

from penstock.kernels.huge_pages import Arena, StepResults, zeros_in_small_pages

SHAPES = [(3, 5), (1,), (70, 1000), (0, 4), (40 << 20,), (7,)]


def test_tensors_of_an_arena_keep_apart_and_begin_where_a_cache_line_does() -> None:
    arena = Arena()
    tensors = [arena.zeros(shape, torch.bfloat16).fill_(number) for number, shape in enumerate(SHAPES)]
    for number, (tensor, shape) in enumerate(zip(tensors, SHAPES, strict=True)):
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert (tensor == number).all()
        assert tensor.data_ptr() % 64 == 0
    first, second = tensors[:2]
    assert second.data_ptr() - first.data_ptr() == 64, "they do not lie together"
    assert first.data_ptr() % (2 << 20) == 0, "no huge page begins there"


def test_views_of_an_arena_outlive_it() -> None:
    arena = Arena()
    tensors = [arena.zeros((1000,), torch.float32).fill_(number) for number in range(3)]
    del arena, tensors[0]
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [2.0]]


def test_zeros_in_small_pages_take_memory_as_they_are_written() -> None:
    before = psutil.Process().memory_info().rss
    tensor = zeros_in_small_pages((1024, 1 << 20), torch.uint8)
    tensor[::2, :5] = 7
    assert psutil.Process().memory_info().rss < before + (64 << 20), "512 rows use a page of 4 KiB each, or of 64 KiB"
    assert tensor[:2, 3:7].tolist() == [[7, 7, 0, 0], [0, 0, 0, 0]]
    assert zeros_in_small_pages((0, 3), torch.bfloat16).shape == (0, 3)


def test_results_use_the_memory_of_those_that_are_gone() -> None:
    results = StepResults()
    first = results.empty(64, 1000)
    address = first.data_ptr()
    row = first[3].fill_(7.0)
    del first
    second = results.empty(64, 1000).fill_(0.0)
    assert second.data_ptr() != address, "a view of the first one is left"
    assert (row == 7.0).all()
    address = second.data_ptr()
    del second
    for num_rows in (64, 40):
        tensor = results.empty(num_rows, 1000)
        assert (tensor.data_ptr(), tensor.shape, tensor.dtype) == (address, (num_rows, 1000), torch.float32)
        del tensor
    assert results.empty(1 << 10, 1000).fill_(1.0).sum() == 1000 << 10, "larger than the memory of the ones before"


@pytest.mark.parametrize("num_rows", [0, 1, 20_000])
def test_small_and_rare_results_have_their_own_memory(num_rows: int) -> None:
    results = StepResults()
    address = results.empty(64, 1000).data_ptr()
    tensor = results.empty(num_rows, 1000)
    assert tensor.shape == (num_rows, 1000)
    assert tensor.data_ptr() != address
