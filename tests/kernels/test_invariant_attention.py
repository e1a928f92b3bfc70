"""Batch-invariant attention gives a token the same bits in any company; the reference's tests cover its values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels.paged_attention import PagedBatch, invariant, paged_attention

from .paged_cases import Case, make_case, naive

# Lengths of three requests that end, in tiles of 128 keys: within a tile, just after one, in the middle of the third.
LENGTHS = (41, 129, 300)
NUM_TOKENS = 8


def attend(case: Case, tokens: list[tuple[int, int]], **options: Any) -> Tensor:
    """Results ``[T, H, DV]`` of ``(request, position)`` tokens of a case of whole prompts, each a row of its own."""
    requests = torch.tensor([request for request, _ in tokens])
    positions = torch.tensor([position for _, position in tokens])
    batch = PagedBatch(
        case.batch.block_table[requests],
        torch.zeros(0),
        [1] * len(tokens),
        (positions + 1).tolist(),
        case.batch.block_size,
    )
    starts = torch.tensor([sum(LENGTHS[:request]) for request, _ in tokens])
    return paged_attention(case.query[starts + positions], case.key_cache, case.value_cache, batch, **options)


def companies(token: tuple[int, int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Batches with ``token``, and its place in each: copies of it, short company, long company, any."""
    rng = random.Random(0)
    everybody = [(request, position) for request, length in enumerate(LENGTHS) for position in range(length)]
    others = [[token] * 7, [(0, 5)] * 7, [(2, 299)] * 7, *(rng.sample(everybody, 7) for _ in range(20))]
    places = [rng.randrange(NUM_TOKENS) for _ in others]
    return [(place, [*rest[:place], token, *rest[place:]]) for place, rest in zip(places, others, strict=True)]


OPTIONS = {
    "causal": {},
    "window": {"window": 70},
    "softcap and sinks": {"softcap": 4.0, "sinks": torch.linspace(-1.0, 2.0, 6)},
    "rule": {"mask_rule": lambda _b, _h, query, key: (key <= query) & (query // 90 == key // 90)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_same_bits_in_any_company(options: dict[str, Any], dtype: torch.dtype) -> None:
    case = make_case([(length, length) for length in LENGTHS], 6, 2, 24, 16, dtype)
    for token in [(0, 0), (0, 40), (1, 127), (1, 128), (2, 255), (2, 299)]:
        results = [
            attend(case, tokens, scale=0.2, is_batch_invariant=True, **options)[place]
            for place, tokens in companies(token)
        ]
        assert all(torch.equal(result, results[0]) for result in results)


class Products(TorchDispatchMode):
    """Notes the shapes of every product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[torch.Size, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.mm):
            self.shapes.add(tuple(tensor.shape for tensor in args))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("references")
@pytest.mark.parametrize("is_batch_invariant", [True, False])
def test_the_shapes_of_products_do_not_follow_the_company(is_batch_invariant: bool) -> None:
    """Equal shapes give equal bits; the shapes of the reference's products depend on the batch."""
    case = make_case([(length, length) for length in LENGTHS], 6, 2, 24, 16, torch.float32)
    shapes_by_batch = []
    for _, tokens in companies((1, 128)):
        with Products() as products:
            attend(case, tokens, scale=0.2, is_batch_invariant=is_batch_invariant)
        shapes_by_batch.append(products.shapes)
    assert all(shapes_by_batch)
    assert all(shapes == shapes_by_batch[0] for shapes in shapes_by_batch) == is_batch_invariant


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_several_tiles(
    options: dict[str, Any], assert_close: Callable[[Tensor, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "_TILE_LEN", 16)
    case = make_case([(1, 9), (1, 100), (1, 16), (30, 95), (2, 17)], 6, 2, 24, 16, torch.float32)
    out = case.attend(scale=0.2, is_batch_invariant=True, **options)
    assert_close(out, naive(case, 0.2, **options))
