"""Paged attention against a float64 implementation that loops over requests, tokens and heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from penstock.kernels.errors import KernelInputError
from penstock.kernels.paged_attention import MaskRule, PagedBatch, gather, paged_attention, reference

# (query_len, seq_len) of each row, decodes first.
MIXES = {
    "one decode": [(1, 1)],
    "decodes": [(1, 9), (1, 63), (1, 1), (1, 16), (1, 17)],
    "prefill": [(63, 63)],
    "chunk": [(7, 41)],
    "mixed": [(1, 30), (1, 2), (41, 41), (9, 60), (2, 33)],
}
BLOCK_SIZE = 7


@dataclass
class Case:
    """Random inputs; every cache slot that no request owns is NaN."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PagedBatch
    keys: list[Tensor]
    values: list[Tensor]


def make_case(
    rows: list[tuple[int, int]], num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> Case:
    generator = torch.Generator().manual_seed(len(rows) * num_heads + key_dim)
    counts = [-(-seq_len // BLOCK_SIZE) for _, seq_len in rows]
    num_blocks = sum(counts) + 3
    shuffled = torch.randperm(num_blocks, generator=generator).tolist()
    # What stands behind a row's last block in the table is never looked at: here an id far outside the cache.
    table = torch.full((len(rows), max(counts) + 1), 10**6)
    key_cache = torch.full((num_blocks, BLOCK_SIZE, num_kv_heads, key_dim), float("nan"), dtype=dtype)
    value_cache = torch.full((num_blocks, BLOCK_SIZE, num_kv_heads, value_dim), float("nan"), dtype=dtype)
    keys, values, slots = [], [], []
    for row, (query_len, seq_len) in enumerate(rows):
        blocks = [shuffled.pop() for _ in range(counts[row])]
        table[row, : len(blocks)] = torch.tensor(blocks)
        own = torch.tensor([blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(seq_len)])
        keys.append(torch.randn(seq_len, num_kv_heads, key_dim, generator=generator).to(dtype))
        values.append(torch.randn(seq_len, num_kv_heads, value_dim, generator=generator).to(dtype))
        key_cache.view(-1, num_kv_heads, key_dim)[own] = keys[-1]
        value_cache.view(-1, num_kv_heads, value_dim)[own] = values[-1]
        slots.append(own[-query_len:])
    query_lens, seq_lens = [q for q, _ in rows], [s for _, s in rows]
    # Heads first in memory, as transformers hands the query over.
    query = torch.randn(num_heads, sum(query_lens), key_dim, generator=generator).to(dtype).transpose(0, 1)
    batch = PagedBatch(table, torch.cat(slots), query_lens, seq_lens, BLOCK_SIZE)
    return Case(query, key_cache, value_cache, batch, keys, values)


def naive(
    case: Case,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask_rule: MaskRule | None = None,
) -> Tensor:
    """``[T, H, DV]`` in float64."""
    query = case.query.double()
    rows = []
    token = 0
    for row, (query_len, seq_len) in enumerate(zip(case.batch.query_lens, case.batch.seq_lens, strict=True)):
        keys, values = case.keys[row].double(), case.values[row].double()
        group_size = query.shape[1] // keys.shape[1]
        for position in range(seq_len - query_len, seq_len):
            seen = [p for p in range(seq_len) if p <= position and (window is None or p > position - window)]
            if mask_rule is not None:
                seen = [p for p in range(seq_len) if mask_rule(0, 0, torch.tensor(position), torch.tensor(p))]
            heads = []
            for head in range(query.shape[1]):
                scores = keys[seen, head // group_size] @ query[token, head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = torch.softmax(scores, dim=0)[: len(seen)]
                heads.append(weights @ values[seen, head // group_size])
            rows.append(torch.stack(heads))
            token += 1
    return torch.stack(rows)


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
    out = paged_attention(
        case.query, case.key_cache, case.value_cache, case.batch, scale=scale, is_batch_invariant=is_batch_invariant
    )
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
    out = paged_attention(
        case.query,
        case.key_cache,
        case.value_cache,
        case.batch,
        scale=0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
        is_batch_invariant=is_batch_invariant,
    )
    assert_close(out, naive(case, 0.5, window, softcap, sinks))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_mask_rule_of_the_models_own(
    softcap: float | None, is_batch_invariant: bool, assert_close: Callable[[Tensor, Tensor], None]
) -> None:
    def chunked(_batch: int, _head: int, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query // 8 == key // 8)

    case = make_case(MIXES["mixed"], 4, 2, 24, 24, torch.float32)
    out = paged_attention(
        case.query,
        case.key_cache,
        case.value_cache,
        case.batch,
        scale=0.3,
        softcap=softcap,
        mask_rule=chunked,
        is_batch_invariant=is_batch_invariant,
    )
    assert_close(out, naive(case, 0.3, softcap=softcap, mask_rule=chunked))


def test_rows_of_very_different_length_are_grouped(
    assert_close: Callable[[Tensor, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_MIN_TOKENS_SAVED_BY_SPLIT", 50)
    case = make_case([(1, 9), (1, 100), (1, 3), (1, 95), (1, 20), (1, 8)], 4, 2, 24, 24, torch.float32)
    out = paged_attention(case.query, case.key_cache, case.value_cache, case.batch, scale=0.3)
    groups = gather.decode_groups(case.batch, None, None)
    assert [group.rows.tolist() for group in groups if group.rows is not None] == [[1, 3], [4, 0, 5, 2]]
    assert_close(out, naive(case, 0.3))


def test_a_long_chunk_is_done_in_tiles(
    assert_close: Callable[[Tensor, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MAX_TILE_ELEMENTS", 4 * 41 * 9)
    case = make_case([(30, 41)], 4, 2, 24, 24, torch.float32)
    out = paged_attention(case.query, case.key_cache, case.value_cache, case.batch, scale=0.3, softcap=5.0)
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
    with pytest.raises(KernelInputError, match="decode rows must come first"):
        PagedBatch(batch.block_table, batch.slot_mapping, [2, 1], [9, 5], BLOCK_SIZE)
