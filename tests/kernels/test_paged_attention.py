"""Paged attention against a float64 implementation that loops over requests, tokens and heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.paged_attention import PagedBatch, gather, paged_attention, reference

from .paged_cases import make_case, naive

# (query_len, seq_len) of each row, decodes first.
MIXES = {
    "one decode": [(1, 1)],
    "decodes": [(1, 9), (1, 63), (1, 1), (1, 16), (1, 17)],
    "prefill": [(63, 63)],
    "chunk": [(7, 41)],
    "mixed": [(1, 30), (1, 2), (41, 41), (9, 60), (2, 33)],
}


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (6, 1)])
@pytest.mark.parametrize("rows", MIXES.values(), ids=MIXES.keys())
def test_causal(
    rows: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    is_batch_invariant: bool,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    case = make_case(rows, num_heads, num_kv_heads, 40, 40, dtype)
    scale = 1 / math.sqrt(40)
    out = case.attend(scale=scale, is_batch_invariant=is_batch_invariant)
    assert_close(out, naive(case, scale))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 5, 30, 100])
@pytest.mark.parametrize("rows", [MIXES["mixed"], MIXES["decodes"]], ids=["mixed", "decodes"])
def test_window_softcap_and_sinks(
    rows: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    is_batch_invariant: bool,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    case = make_case(rows, 4, 2, 24, 16, torch.float32)
    sinks = torch.linspace(-1.0, 2.0, 4) if has_sinks else None
    out = case.attend(
        scale=0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
        is_batch_invariant=is_batch_invariant,
    )
    assert_close(out, naive(case, 0.5, window, softcap, sinks))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
def test_tokens_that_attend_to_each_other(
    window: int | None, is_batch_invariant: bool, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    """All of a prompt; some of a chunk, without its first and last; and a chunk in which no token does."""
    case = make_case(MIXES["mixed"], 4, 2, 32, 32, torch.float32)
    case.batch.visible_ends = torch.tensor([30, 2, *[41] * 41, 52, *[57] * 5, 58, 59, 60, 32, 33])
    out = case.attend(scale=0.5, window=window, is_batch_invariant=is_batch_invariant)
    assert_close(out, naive(case, 0.5, window))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_mask_rule_of_the_models_own(
    softcap: float | None, is_batch_invariant: bool, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    def chunked(_batch: int, _head: int, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query // 8 == key // 8)

    case = make_case(MIXES["mixed"], 4, 2, 24, 24, torch.float32)
    out = case.attend(
        scale=0.3,
        softcap=softcap,
        mask_rule=chunked,
        is_batch_invariant=is_batch_invariant,
    )
    assert_close(out, naive(case, 0.3, softcap=softcap, mask_rule=chunked))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 3.0, "sinks": torch.linspace(-1.0, 2.0, 4)}])
def test_alibi_slopes(
    options: dict[str, Any], is_batch_invariant: bool, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    options = options | {"scale": 0.3, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}
    case = make_case(MIXES["mixed"], 4, 2, 24, 24, torch.float32)
    assert_close(case.attend(is_batch_invariant=is_batch_invariant, **options), naive(case, **options))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float8_cache(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    softcap: float | None,
    is_batch_invariant: bool,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "key_scale": 0.7, "value_scale": 1.5}
    case = make_case(MIXES["mixed"], 4, 2, 24, 16, dtype, cache_dtype=cache_dtype)
    assert_close(case.attend(is_batch_invariant=is_batch_invariant, **options), naive(case, **options))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 16), (64, 64), (80, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_cache(
    *,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    softcap: float | None,
    is_batch_invariant: bool,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap}
    case = make_case(MIXES["mixed"], 4, 2, key_dim, value_dim, dtype, cache_dtype=torch.int8)
    assert_close(case.attend(is_batch_invariant=is_batch_invariant, **options), naive(case, **options))


def test_rows_of_very_different_length_are_grouped(
    assert_close: Callable[[Tensor, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_MIN_TOKENS_SAVED_BY_SPLIT", 50)
    case = make_case([(1, 9), (1, 100), (1, 3), (1, 95), (1, 20), (1, 8)], 4, 2, 24, 24, torch.float32)
    out = case.attend(scale=0.3)
    groups = gather.decode_groups(case.batch, None, None)
    assert [group.rows.tolist() for group in groups if group.rows is not None] == [[1, 3], [4, 0, 5, 2]]
    assert_close(out, naive(case, 0.3))


def test_a_long_chunk_is_done_in_tiles(
    assert_close: Callable[[Tensor, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MAX_TILE_ELEMENTS", 4 * 41 * 9)
    case = make_case([(30, 41)], 4, 2, 24, 24, torch.float32)
    out = case.attend(scale=0.3, softcap=5.0)
    assert_close(out, naive(case, 0.3, softcap=5.0))


def test_wrong_inputs_are_named() -> None:
    case = make_case([(1, 5), (2, 9)], 4, 2, 24, 24, torch.float32)
    query, keys, values, batch = case.query, case.key_cache, case.value_cache, case.batch
    for arguments, message in (
        ((query[0], keys, values), "query must be"),
        ((query[:2], keys, values), "3 tokens"),
        ((query[:, :3], keys, values), "KVH"),
        ((query, keys, values[:2]), "value_cache"),
        ((query, keys[:, :4], values[:, :4]), "blocks of 4"),
        ((query, keys, values.bfloat16()), "dtype"),
    ):
        with pytest.raises(KernelInputError, match=message):
            paged_attention(*arguments, batch, scale=1.0)
    wrong_options: list[tuple[dict[str, Any], str]] = [
        ({"sinks": torch.zeros(2)}, "sinks must be"),
        ({"alibi_slopes": torch.zeros(4, 1)}, "alibi_slopes must be"),
        ({"value_scale": 2.0}, "value_scale must be positive, and 1 for a torch.float32 cache that is not float8"),
        ({"key_scale": torch.ones(1)}, "key_scale must be positive"),
        ({"window": 0}, "window"),
    ]
    for options, message in wrong_options:
        with pytest.raises(KernelInputError, match=message):
            paged_attention(query, keys, values, batch, scale=1.0, **options)
    with pytest.raises(KernelInputError, match="contiguous"):
        paged_attention(query, keys.transpose(0, 1).contiguous().transpose(0, 1), values, batch, scale=1.0)
    case = make_case([(1, 5), (2, 9)], 4, 2, 24, 24, torch.float32, cache_dtype=torch.int8)
    for scale, message in (
        (1.0, r"key_scale of an int8 cache must be bfloat16 \[\d+, 7, 2, 1\], got 1.0"),
        (case.scales["key_scale"].float(), "got torch.float32"),
        (case.scales["key_scale"].expand(-1, -1, -1, 2), r"got torch.bfloat16 \[\d+, 7, 2, 2\]"),
        (case.scales["key_scale"].transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
    ):
        with pytest.raises(KernelInputError, match=message):
            replace(case, scales={**case.scales, "key_scale": scale}).attend(scale=1.0)
    with pytest.raises(KernelInputError, match="decode rows must come first"):
        PagedBatch(batch.block_table, batch.slot_mapping, [2, 1], [9, 5], batch.block_size)
