"""Attention by the compiled library: its results, and bits of a token that do not depend on other tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.paged_attention import PagedBatch, backend_of, paged_attention

from .paged_cases import Case, make_case, naive

pytestmark = pytest.mark.usefixtures("compiled")

DTYPES = [torch.float32, torch.bfloat16]
# Of three prompts; blocks have 7 tokens.
LENGTHS = (41, 7, 150)


@pytest.fixture
def two_threads() -> Iterator[None]:
    native.set_num_threads(2)
    yield
    native.set_num_threads(1)


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (8, 8), (40, 2)])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_paged_attention(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
    is_batch_invariant: bool,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    """Return decodes of many lengths next to prefill chunks; slots that no request owns are NaN."""
    rows = [(1, 1), (1, 7), (1, 8), (1, 41), (5, 5), (3, 20)]
    case = make_case(rows, num_heads, num_kv_heads, head_dim, head_dim, dtype)
    scale = head_dim**-0.5
    out = case.attend(
        scale=scale,
        window=window,
        is_batch_invariant=is_batch_invariant,
    )
    assert_close(out, naive(case, scale, window))


@pytest.mark.parametrize("window", [None, 5, 30])
def test_tokens_that_attend_to_each_other(window: int | None, assert_close: Callable[[Tensor, Tensor], None]) -> None:
    case = make_case([(1, 12), (9, 9), (6, 30)], 4, 2, 32, 32, torch.float32)
    case.batch.visible_ends = torch.tensor([12, *[9] * 9, 25, 29, 29, 29, 29, 30])
    out = case.attend(
        scale=0.5,
        window=window,
        is_batch_invariant=True,
    )
    assert_close(out, naive(case, 0.5, window))


def attend(case: Case, rows: list[tuple[int, int, int]], **options: Any) -> dict[tuple[int, int], Tensor]:
    """Results by ``(request, position)``, of ``(request, first, stop)`` rows of a case of whole prompts."""
    rows = sorted(rows, key=lambda row: row[2] - row[1] > 1)
    tokens = [(request, position) for request, first, stop in rows for position in range(first, stop)]
    batch = PagedBatch(
        case.batch.block_table[[request for request, _, _ in rows]],
        torch.zeros(0),
        [stop - first for _, first, stop in rows],
        [stop for _, _, stop in rows],
        case.batch.block_size,
    )
    places = [sum(LENGTHS[:request]) + position for request, position in tokens]
    inputs = case.query[places], case.key_cache, case.value_cache, batch
    out = paged_attention(*inputs, scale=0.2, is_batch_invariant=True, **options)
    return dict(zip(tokens, out, strict=True))


def cut_up(rng: random.Random) -> list[tuple[int, int, int]]:
    """A forward with some of the requests, of each any span of its tokens."""
    requests = rng.sample(range(len(LENGTHS)), rng.randint(1, len(LENGTHS)))
    spans = [sorted(rng.sample(range(LENGTHS[request] + 1), 2)) for request in requests]
    return [(request, first, stop) for request, (first, stop) in zip(requests, spans, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=["causal", "window"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_same_bits_however_requests_are_cut_and_batched(
    num_threads: int, options: dict[str, Any], dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    case = make_case([(length, length) for length in LENGTHS], 6, 2, 32, 32, dtype)
    whole = attend(case, [(index, 0, length) for index, length in enumerate(LENGTHS)], **options)
    if num_threads == 2:
        request.getfixturevalue("two_threads")
    rng = random.Random(0)
    for _ in range(60):
        for token, result in attend(case, cut_up(rng), **options).items():
            assert torch.equal(result, whole[token]), token


def test_a_decode_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    request: pytest.FixtureRequest,
) -> None:
    """Without being asked for them."""
    case = make_case([(1, 5 + 3 * row) for row in range(8)], 6, 2, 32, 32, torch.float32)
    inputs = case.key_cache, case.value_cache

    def decode(rows: list[int]) -> Tensor:
        lens = [case.batch.seq_lens[row] for row in rows]
        batch = PagedBatch(case.batch.block_table[rows], torch.zeros(0), [1] * len(rows), lens, case.batch.block_size)
        return paged_attention(case.query[rows], *inputs, batch, scale=0.1)

    together = decode(list(range(8)))
    for row in range(8):
        assert torch.equal(decode([row])[0], together[row])
    request.getfixturevalue("two_threads")
    assert torch.equal(decode(list(range(8))), together)


def test_backend_of_names_the_implementation_that_runs() -> None:
    backends = [
        backend_of(torch.device("cpu"), torch.float32, cache, (dim, dim), is_batch_invariant=True)
        for cache, dim in ((torch.float32, 32), (torch.float32, 24), (torch.float8_e4m3fn, 32))
    ]
    assert backends == ["native", "reference", "reference"]
