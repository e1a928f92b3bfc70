"""Tensors that lie together in huge pages."""

from __future__ import annotations

import torch

from penstock.kernels.huge_pages import Arena

SHAPES = [(3, 5), (1,), (70, 1000), (0, 4), (40 << 20,), (7,)]


def test_tensors_of_an_arena_keep_apart_and_begin_where_a_cache_line_does() -> None:
    arena = Arena()
    tensors = [arena.empty(shape, torch.bfloat16).fill_(number) for number, shape in enumerate(SHAPES)]
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
    tensors = [arena.empty((1000,), torch.float32).fill_(number) for number in range(3)]
    del arena, tensors[0]
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [2.0]]
