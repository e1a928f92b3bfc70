"""Layers that share pages: bits are those of layers with caches of their own, and nothing behind a window is read."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest
import torch

from penstock.kernels.dispatch import KernelInputError
from penstock.worker.models.attention.call import AttentionCall, CacheFormat
from penstock.worker.models.attention.page_layout import PageLayout
from penstock.worker.models.attention.pages import PagedByGroups, plan_pages, shapes_differ
from penstock.worker.models.forward import Forward
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.lean.native import NativeForward, make_native
from penstock.worker.models.modes.packed import PackedForward
from penstock.worker.models.placing.packed_linear import pack_linear_layers

from .lean_models import BLOCK_SIZE, NUM_BLOCKS, SETTINGS, in_groups, logits_of, make_model, steps

CPU = torch.device("cpu")
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))


# Layers whose heads are of two sizes share no pages.
_ALIKE = {"gemma4": {"global_head_dim": 16}}


def make_forward(variant: str, way: str, dtype: torch.dtype) -> Forward:
    model = make_model(variant, dtype, **_ALIKE.get(variant, {}))
    if way == "packed":
        return PackedForward(model, SETTINGS)
    lean = LeanForward(model, SETTINGS)
    if way == "lean":
        return lean
    pack_linear_layers(lean.network)
    forward = make_native(lean, BLOCK_SIZE)
    assert isinstance(forward, NativeForward)
    return forward


@pytest.mark.parametrize(
    ("variant", "way", "dtype"),
    [
        *((variant, "native", torch.bfloat16) for variant in ("gemma2", "gemma3", "gemma4", "cohere2", "exaone4")),
        *((variant, "native", torch.float32) for variant in ("gemma3", "mistral, with a window", "phi3")),
        *((variant, "lean", torch.float32) for variant in ("gpt oss", "gemma3", "gemma4", "mistral, with a window")),
        *((variant, "packed", torch.float32) for variant in ("gpt oss", "gemma2")),
    ],
)
@torch.inference_mode()
def test_bits_are_those_of_one_table(
    variant: str, way: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """On caches full of NaN, the null block with the others."""
    if way == "native":
        if not HAS_COMPILER:
            pytest.skip("needs a C++ compiler")
        request.getfixturevalue("compiled")
    forward = make_forward(variant, way, dtype)
    expected = logits_of(forward)
    layout = plan_pages(forward.attention_calls, 1000, BLOCK_SIZE)
    assert layout is not None
    assert isinstance(forward, PagedByGroups)
    null_block = NUM_BLOCKS * len(layout.windows)
    forward.allocate_pages(layout, null_block + 1, BLOCK_SIZE, 3, CPU)
    assert len(forward.caches) == 2 * layout.num_places
    for cache in forward.caches:
        cache.fill_(float("nan"))
    for step, logits in zip(steps(), expected, strict=True):
        assert torch.equal(forward.run(in_groups(step, layout, null_block)), logits)
    assert all(cache[null_block].isnan().all() for cache in forward.caches)
    if len(layout.windows) > 1:
        with pytest.raises(KernelInputError, match="group"):
            forward.run(next(steps()))
    assert all(map(torch.equal, expected, logits_of(forward))), "one table again, after a cache in groups"


def calls(*windows: int | None, **changed: Any) -> list[AttentionCall]:
    made = [
        AttentionCall(torch.nn.Identity(), (2, 8), (2, 8), torch.float32, window, False, CacheFormat(torch.float32))
        for window in windows
    ]
    return [dataclasses.replace(call, **changed) for call in made]


GEMMA_3_4B = [None if index % 6 == 5 else 1024 for index in range(34)]


def test_pages_are_as_wide_as_their_layers_let_them_be() -> None:
    layout = plan_pages(calls(*GEMMA_3_4B), 32_768, 16)
    assert layout is not None
    assert (layout.windows, layout.num_places) == ((None, *[1024] * 6), 5)
    assert [layout.groups[index] for index in (5, 11, 29, 0, 5 + 1)] == [0, 0, 0, 1, 2]
    assert len(set(zip(layout.groups, layout.places, strict=True))) == 34
    assert layout.page_bytes(34 * 100, 16) == 5 * 100 * 16


def test_a_kind_that_would_waste_much_of_wide_pages_makes_them_narrow() -> None:
    layout = plan_pages(calls(*[None] * 5, *[64] * 9), 1024, 16)
    assert layout is not None
    assert (layout.windows, layout.num_places) == ((None, *[64] * 2), 5)
    layout = plan_pages(calls(*[None] * 7, *[64] * 5), 1024, 16)
    assert layout is not None
    assert (layout.windows, layout.num_places) == ((None, 64), 7)
    layout = plan_pages(calls(None, *[512] * 7), 1024, 16)
    assert layout is not None
    assert (layout.windows, layout.num_places) == ((None, *[512] * 7), 1)


def test_layers_that_store_nothing_are_where_they_read() -> None:
    first, second = calls(8, None)
    readers = [dataclasses.replace(first, source=first), dataclasses.replace(second, source=second)]
    layout = plan_pages([first, second, *readers], 4096, 16)
    assert layout is not None
    assert layout == PageLayout((None, 8), 1, (1, 0, 1, 0), (0, 0, 0, 0))
    assert layout.page_bytes(2 * 100, 16) == 100 * 16


def test_layers_with_different_windows_are_in_separate_groups() -> None:
    layout = plan_pages(calls(8, None, 100, 8, None, 100), 4096, 16)
    assert layout == PageLayout((None, 8, 100), 2, (1, 0, 2, 1, 0, 2), (0, 0, 0, 1, 1, 1))


@pytest.mark.parametrize(
    ("layers", "max_model_len"),
    [
        (calls(None, None), 4096),  # nothing to give back
        (calls(1024, None), 1024),  # no request is longer than the window
        (calls(1000, None), 1024),  # hardly longer
        (calls(8, 8, has_own_rule=True), 4096),  # may look anywhere
    ],
)
def test_one_table_where_groups_save_little(layers: list[AttentionCall], max_model_len: int) -> None:
    assert plan_pages(layers, max_model_len, 16) is None


def test_layers_of_different_sizes_are_noticed() -> None:
    assert not shapes_differ(calls(None, 8))
    assert shapes_differ([*calls(None), *calls(8, key_shape=(1, 16))])
