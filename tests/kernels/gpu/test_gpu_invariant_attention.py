"""The batch-invariant Triton kernels give a token the same bits however its prompt was cut, whoever else is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from penstock.kernels.paged_attention import PagedBatch, gpu, gpu_config
from penstock.kernels.paged_attention.batch import Variant

from ..paged_cases import Case, make_case

SPLIT_LEN = 64
# Two prompts; the first ends in its third split, in the middle of a tile of keys.
LENGTHS = (150, 41)
OPTIONS = {
    "causal": {},
    "window": {"window": 70},
    "everything": {
        "softcap": 4.0,
        "sinks": torch.linspace(-1.0, 2.0, 6),
        "alibi_slopes": torch.linspace(0.0, 0.2, 6),
    },
}

VARIANTS = pytest.mark.parametrize(
    ("options", "dtype"),
    [(OPTIONS["causal"], torch.float32), (OPTIONS["everything"], torch.bfloat16)],
    ids=["causal", "everything, bfloat16"],
)


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_config, "INVARIANT_SPLIT_LEN", SPLIT_LEN)
    monkeypatch.setattr(gpu, "_REDUCE_UNROLL", 2)


@pytest.fixture(autouse=True)
def _products_in_one_order(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter uses numpy's BLAS, whose order of additions depends on a row's index; a GPU's does not."""

    def create_dot(_builder: Any, left: Any, right: Any, acc: Any, *_: Any) -> interpreter.TensorHandle:
        products = left.data[:, :, None] * right.data[None]
        return interpreter.TensorHandle(np.add.reduce(products, axis=1) + acc.data, acc.dtype.scalar)

    if device.type == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def attend(case: Case, rows: list[tuple[int, int, int]], options: dict[str, Any]) -> Tensor:
    """Return the packed results of rows ``(request, start, end)`` of a case of whole prompts."""
    starts = [0, LENGTHS[0]]
    tokens = [starts[request] + position for request, first, stop in rows for position in range(first, stop)]
    table = case.batch.block_table[[request for request, _, _ in rows]]
    query_lens, seq_lens = [stop - first for _, first, stop in rows], [stop for _, _, stop in rows]
    batch = PagedBatch(table, torch.zeros(0), query_lens, seq_lens, case.batch.block_size)
    moved: dict[str, Any] = {
        name: value.to(table.device) if isinstance(value, Tensor) else value for name, value in options.items()
    }
    variant = Variant(scale=0.3, **moved)
    return gpu.invariant_paged_attention(case.query[tokens], case.key_cache, case.value_cache, batch, variant)


@VARIANTS
def test_however_a_prompt_is_cut(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    case = make_case([(length, length) for length in LENGTHS], 6, 2, 24, 16, dtype, block_size=16).on(device)
    whole = attend(case, [(0, 0, 150), (1, 0, 41)], options)
    assert not whole.isnan().any()
    assert torch.equal(attend(case, [(0, 0, 150)], options), whole[:150])
    chunks = [(0, 67), (67, 97), (97, 150)]
    for first, stop in chunks:
        with_others = attend(case, [(1, 40, 41), (1, 3, 9), (0, first, stop)], options)
        assert torch.equal(with_others[-(stop - first) :], whole[first:stop])


@pytest.mark.parametrize("is_full", [False, True], ids=["split", "whole"])
@VARIANTS
def test_decode_agrees_with_prefill(
    options: dict[str, Any], dtype: torch.dtype, is_full: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case([(length, length) for length in LENGTHS], 6, 2, 24, 16, dtype, block_size=16).on(device)
    whole = attend(case, [(0, 0, 150)], options)
    monkeypatch.setattr(gpu_config, "sm_count", lambda _: 1 if is_full else 132)
    positions = [0, 31, 63, 64, 65, 127, 149]
    decoded = attend(case, [(0, position, position + 1) for position in positions], options)
    assert torch.equal(decoded, whole[positions])
    alone = attend(case, [(0, 149, 150)], options)
    assert torch.equal(alone[0], whole[149])


def test_a_bound_on_lengths_is_not_part_of_the_result(device: torch.device) -> None:
    case = make_case([(1, 150), (1, 41)], 6, 2, 24, 16, torch.float32, block_size=16).on(device)
    inputs = (case.query, case.key_cache, case.value_cache)
    seq_lens = torch.tensor([150, 41], dtype=torch.int32, device=device)
    batches = [
        PagedBatch.captured_decode(case.batch.block_table, torch.zeros(2), seq_lens, bound, 16) for bound in (150, 640)
    ]
    small, large = (gpu.invariant_paged_attention(*inputs, batch, Variant(0.3)) for batch in batches)
    assert torch.equal(small, large)
    assert torch.equal(small, gpu.invariant_paged_attention(*inputs, case.batch, Variant(0.3)))
