"""The Triton kernels of paged attention against float64; on a CPU by Triton's interpreter, so shapes are small."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.dispatch import KernelInputError, OnGpu
from penstock.kernels.paged_attention import (
    _IMPLEMENTATIONS,
    _INVARIANT_IMPLEMENTATIONS,
    DeviceRows,
    PagedBatch,
    gpu,
    gpu_config,
    invariant,
    reference,
)
from penstock.kernels.paged_attention.batch import Variant

from ..paged_cases import Case, make_case, naive

Compare = Callable[[Tensor, Tensor], None]
KERNELS = {"as suits": gpu.paged_attention, "invariant": gpu.invariant_paged_attention}
MIXED = [(1, 30), (1, 161), (1, 1), (41, 41), (9, 140), (2, 33)]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill allocations of the launcher with NaN; give short rows several splits, more than are reduced together."""
    empty = torch.empty
    monkeypatch.setattr(gpu.torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))
    monkeypatch.setattr(gpu_config, "INVARIANT_SPLIT_LEN", 64)
    monkeypatch.setattr(gpu, "_REDUCE_UNROLL", 2)


def attend(kernel: str, case: Case, device: torch.device, **options: Any) -> Tensor:
    there = case.on(device)
    moved: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()
    }
    out = KERNELS[kernel](
        there.query, there.key_cache, there.value_cache, there.batch, Variant(**moved, **there.scales)
    )
    return out.cpu()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size"),
    [
        (torch.float32, 2, 2, 64, 64, 16),
        (torch.float32, 6, 2, 80, 80, 32),
        (torch.float32, 8, 1, 24, 40, 8),
        (torch.float32, 3, 3, 5, 3, 7),
        (torch.bfloat16, 8, 2, 128, 128, 16),
        (torch.bfloat16, 2, 1, 256, 256, 64),
        (torch.float16, 16, 2, 64, 64, 16),
    ],
)
def test_mixed_batches(
    kernel: str,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    device: torch.device,
    assert_close: Compare,
) -> None:
    case = make_case(MIXED, num_heads, num_kv_heads, key_dim, value_dim, dtype, block_size=block_size)
    assert_close(attend(kernel, case, device, scale=key_dim**-0.5), naive(case, key_dim**-0.5))


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_that_attend_to_each_other(kernel: str, device: torch.device, assert_close: Compare) -> None:
    case = make_case(MIXED, 4, 2, 32, 32, torch.float32, block_size=16)
    case.batch.visible_ends = torch.tensor([30, 161, 1, *[41] * 41, 132, *[137] * 5, 138, 139, 140, 32, 33])
    assert_close(attend(kernel, case, device, scale=0.5, window=30), naive(case, 0.5, 30))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 5},
        {"window": 70},
        {"window": 1000},
        {"softcap": 3.0},
        {"sinks": torch.linspace(-1.0, 9.0, 6)},
        {"alibi_slopes": torch.linspace(0.0, 0.5, 6)},
        {
            "window": 33,
            "softcap": 5.0,
            "sinks": torch.linspace(-1.0, 2.0, 6).bfloat16(),
            "alibi_slopes": torch.linspace(-0.1, 0.5, 6),
        },
    ],
    ids=["window 1", "window 5", "window 70", "window 1000", "softcap", "sinks", "slopes", "all"],
)
def test_variants(kernel: str, options: dict[str, Any], device: torch.device, assert_close: Compare) -> None:
    case = make_case(MIXED, 6, 2, 24, 16, torch.float32, block_size=16)
    assert_close(attend(kernel, case, device, scale=0.4, **options), naive(case, 0.4, **options))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e5m2),
    ],
)
def test_a_float8_cache(
    kernel: str, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device, assert_close: Compare
) -> None:
    options: dict[str, Any] = {"scale": 0.3, "softcap": 6.0, "key_scale": 0.7, "value_scale": 1.5}
    case = make_case(MIXED, 4, 2, 32, 16, dtype, block_size=16, cache_dtype=cache_dtype)
    assert_close(attend(kernel, case, device, **options), naive(case, **options))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 16), (80, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_cache(
    *, kernel: str, dtype: torch.dtype, key_dim: int, value_dim: int, device: torch.device, assert_close: Compare
) -> None:
    options: dict[str, Any] = {"scale": 0.3, "softcap": 6.0}
    case = make_case(MIXED, 4, 2, key_dim, value_dim, dtype, block_size=16, cache_dtype=torch.int8)
    assert_close(attend(kernel, case, device, **options), naive(case, **options))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_full_device_does_not_split(
    kernel: str, device: torch.device, assert_close: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_config, "sm_count", lambda _: 1)
    case = make_case([(1, 100), (1, 3), (1, 65)], 4, 1, 16, 16, torch.float32, block_size=16)
    assert gpu_config.num_splits(3, 100, 1) == 1
    sinks = torch.linspace(-1.0, 2.0, 4)
    assert_close(attend(kernel, case, device, scale=0.3, sinks=sinks), naive(case, 0.3, sinks=sinks))


def test_few_query_tokens_a_row_take_a_small_tile(device: torch.device, assert_close: Compare) -> None:
    case = make_case([(2, 40), (4, 4), (3, 50)], 4, 1, 16, 16, torch.float32, block_size=16)
    tile = gpu_config.varlen_tile(4, 16, 4, 4, case.batch.device_rows.max_query_len)
    assert tile == gpu_config.decode_tile(4, 16, 4, 4)
    assert_close(attend("as suits", case, device, scale=0.3), naive(case, 0.3))


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_heads_in_a_group_than_fit_a_tile(
    kernel: str, device: torch.device, assert_close: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_config, "_max_heads", lambda _: 4)
    case = make_case([(1, 100), (5, 9)], 14, 2, 16, 16, torch.float32, block_size=16)
    assert gpu_config.decode_tile(7, 16, 4, 4).heads == 4
    assert_close(attend(kernel, case, device, scale=0.3), naive(case, 0.3))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_batch_for_capture_follows_its_tensors(
    kernel: str, has_sinks: bool, device: torch.device, assert_close: Compare
) -> None:
    case = make_case([(1, 100), (1, 17), (1, 64)], 4, 2, 16, 16, torch.float32, block_size=16)
    sinks = torch.linspace(-1.0, 2.0, 4) if has_sinks else None
    expected = naive(case, 0.3, sinks=sinks)
    case = case.on(device)
    table = torch.full((5, 16), 10**6, dtype=torch.int32, device=device)
    seq_lens, query = torch.zeros(5, dtype=torch.int32, device=device), torch.zeros(5, 4, 16, device=device)
    batch = PagedBatch.captured_decode(table, seq_lens.long() - 1, seq_lens, 256, 16)
    variant = Variant(0.3, sinks=None if sinks is None else sinks.to(device))
    inputs = (query, case.key_cache, case.value_cache, batch, variant)
    assert torch.equal(KERNELS[kernel](*inputs).cpu(), torch.zeros(5, 4, 16))
    table[:3, : case.batch.block_table.shape[1]] = case.batch.block_table
    seq_lens[:3] = torch.tensor(case.batch.seq_lens)
    query[:3] = case.query
    out = KERNELS[kernel](*inputs).cpu()
    assert_close(out[:3], expected)
    assert torch.equal(out[3:], torch.zeros(2, 4, 16))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 20])
def test_captured_rows_of_any_number_of_tokens(
    kernel: str, window: int | None, device: torch.device, assert_close: Compare
) -> None:
    """Two decodes, two chunks, two rows and six tokens that are not in use."""
    case = make_case([(1, 100), (1, 17), (9, 40), (3, 3)], 4, 2, 16, 16, torch.float32, block_size=16)
    expected = naive(case, 0.3, window)
    case = case.on(device)
    table = torch.full((6, 16), 10**6, dtype=torch.int32, device=device)
    table[:4, : case.batch.block_table.shape[1]] = case.batch.block_table
    starts, seq_lens, decode_lens = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in ([0, 1, 2, 11, 14, 14, 14], [100, 17, 40, 3, 0, 0], [100, 17, -1, -1, -1, -1])
    )
    rows = DeviceRows(starts, seq_lens, 20, 256, decode_lens)
    slots, query = torch.full((20,), -1, device=device), torch.full((20, 4, 16), float("nan"), device=device)
    query[:14] = case.query
    batch = PagedBatch.captured_rows(table, slots, rows, 16)
    out = KERNELS[kernel](query, case.key_cache, case.value_cache, batch, Variant(0.3, window)).cpu()
    assert_close(out[:14], expected)
    assert torch.equal(out[14:], torch.zeros(6, 4, 16))


def test_captured_rows_mark_decodes() -> None:
    rows = DeviceRows(torch.tensor([0, 2]), torch.tensor([2]), 2, 8)
    with pytest.raises(KernelInputError, match="decode_lens"):
        PagedBatch.captured_rows(torch.zeros(1, 2), torch.zeros(2), rows, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_captured_graph_uses_its_tensors_current_values(kernel: str, device: torch.device) -> None:
    rows = [(1, 1000), (1, 17), (1, 640), (1, 3)]
    case = make_case(rows, 16, 8, 128, 128, torch.bfloat16, block_size=16).on(device)
    caches, variant = (case.key_cache, case.value_cache), Variant(128**-0.5)
    table = torch.zeros(4, 64, dtype=torch.int32, device=device)
    seq_lens, query = torch.zeros(4, dtype=torch.int32, device=device), torch.zeros_like(case.query)
    batch = PagedBatch.captured_decode(table, seq_lens.long() - 1, seq_lens, 1024, 16)
    KERNELS[kernel](query, *caches, batch, variant)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = KERNELS[kernel](query, *caches, batch, variant)
    table[:, : case.batch.block_table.shape[1]] = case.batch.block_table
    seq_lens.copy_(torch.tensor([1000, 17, 640, 0]))
    query.copy_(case.query)
    graph.replay()
    expected = KERNELS[kernel](query, *caches, batch, variant)
    assert torch.equal(out, expected)
    assert torch.equal(out[3], torch.zeros_like(out[3]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_rule_runs_in_torch_and_is_reported(
    kernel: str, device: torch.device, assert_close: Compare, log_records: list[logging.LogRecord]
) -> None:
    def chunked(_batch: int, _head: int, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query // 8 == key // 8)

    case = make_case([(1, 30), (9, 20)], 4, 2, 24, 24, torch.float32)
    assert_close(attend(kernel, case, device, scale=0.3, mask_rule=chunked), naive(case, 0.3, mask_rule=chunked))
    gpu.warn_once.cache_clear()
    attend(kernel, case, device, scale=0.3, mask_rule=chunked)
    assert "mask rule" in log_records[-1].__dict__["reason"]


def test_the_wrapper_finds_them() -> None:
    for implementations, fallback, kernel in (
        (_IMPLEMENTATIONS, reference.paged_attention, gpu.paged_attention),
        (_INVARIANT_IMPLEMENTATIONS, invariant.paged_attention, gpu.invariant_paged_attention),
    ):
        chosen = implementations["cuda"]
        assert isinstance(chosen, OnGpu)
        assert chosen.choose(torch.bfloat16, fallback) is kernel


def test_a_small_batch_is_split_until_it_fills_the_device() -> None:
    counts = {programs: gpu_config.num_splits(programs, 40960, 132) for programs in (1, 8, 16, 64, 128, 200, 264, 2048)}
    assert counts == {1: 116, 8: 30, 16: 15, 64: 4, 128: 2, 200: 5, 264: 1, 2048: 1}
    assert gpu_config.num_splits(8, 200, 132) == 3
    assert gpu_config.num_splits(8, 1, 132) == 1
