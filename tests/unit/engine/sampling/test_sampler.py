"""The sampler against exact probabilities worked out in float64 by sorting everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.kernels import native
from penstock.kernels.sampling import reference
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.sampling.sampler import SamplingRows, SamplingTable, sample, uniforms
from penstock.worker.engine.scheduling.request import Request

from ....native_library import native_as_before

NUM_DRAWS = 1500
MIN_DRAWS_PER_BIN = 8
# Chi-square at the 1e-6 level is near dof + 7 * sqrt(dof) here; the seeds are fixed, so the outcome is too.
CHI_SQUARE_SIGMAS = 7.0


@pytest.fixture(autouse=True, params=["reference", "compiled"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs on both."""
    with native_as_before():
        native.unload()
        if request.param == "compiled" and (reason := native.load()) is not None:
            pytest.skip(reason)
        yield


def rows_of(num_rows: int, seed: int = 7, **params: Any) -> SamplingRows:
    """``num_rows`` equal rows, one for each output position."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    dtypes = {"top_k": np.int64}
    return SamplingRows(
        parameters={name: np.full(num_rows, value, dtypes.get(name, np.float32)) for name, value in values.items()},
        seeds=np.full(num_rows, seed, np.uint64),
        positions=np.arange(num_rows),
    )


def exact_probabilities(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """Return the probabilities of ``logits``, ``[V]``, after the filters, in vLLM's order."""
    values = logits.double().numpy() / temperature
    weights = np.exp(values - values.max())
    weights[weights < min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        weights[order[top_k:]] = 0.0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= top_p]] = 0.0
    return weights / weights.sum()


def assert_distributed(tokens: torch.Tensor, probabilities: NDArray[np.float64]) -> None:
    counts = np.bincount(tokens.numpy(), minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0, "a token that the filters drop was drawn"
    expected = probabilities * len(tokens)
    # Neighbours share a bin until it expects enough draws, so that rare tokens count too.
    bins = ((np.cumsum(expected) - expected / 2) / MIN_DRAWS_PER_BIN).astype(int)
    expected, observed = np.bincount(bins, expected), np.bincount(bins, counts)
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = max(1, len(expected) - 1)
    assert chi_square < freedom + CHI_SQUARE_SIGMAS * (2 * freedom) ** 0.5


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 90},
    {"top_k": 10**6},
    {"top_p": 0.6},
    {"top_p": 0.97},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 0.2, "top_p": 0.7},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.5, "top_k": 80, "top_p": 0.95},
]


@pytest.mark.parametrize("vocab_size", [7, 300, 2000])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_distribution(params: dict[str, Any], vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 2.0 * torch.randn(vocab_size, generator=generator)
    tokens = sample(logits.expand(NUM_DRAWS, -1).clone(), rows_of(NUM_DRAWS, **params))
    assert_distributed(tokens, exact_probabilities(logits, **params))


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_p": 0.999}, {"top_p": 0.9, "min_p": 0.1}], ids=str)
def test_a_flat_nucleus_is_wider_than_the_first_candidates(params: dict[str, Any]) -> None:
    logits = torch.linspace(0.0, 1.0, 1500)
    tokens = sample(logits.expand(NUM_DRAWS, -1).clone(), rows_of(NUM_DRAWS, **params))
    probabilities = exact_probabilities(logits, **params)
    assert (probabilities > 0).sum() > 1024
    assert_distributed(tokens, probabilities)


def mixed_rows(num_rows: int) -> SamplingRows:
    """Rows that take every path of the sampler."""
    rows = rows_of(num_rows)
    index = np.arange(num_rows)
    rows.seeds = index.astype(np.uint64) * np.uint64(3)
    rows.parameters["temperature"] = np.choose(index % 3, [0.0, 0.8, 1.4]).astype(np.float32)
    rows.parameters["top_k"] = np.choose(index % 4, [0, 3, 100, 1400])
    rows.parameters["top_p"] = np.choose(index % 5, [1.0, 0.5, 0.9, 0.99, 1.0]).astype(np.float32)
    rows.parameters["min_p"] = np.choose(index % 7, [0.0, 0.1, 0.0, 0.0, 0.3, 0.0, 0.0]).astype(np.float32)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_the_rest_of_the_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = 63
    logits = torch.randn(num_rows, 1500, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = mixed_rows(num_rows)
    together = sample(logits.clone(), rows)
    alone = torch.cat([sample(logits[i : i + 1].clone(), rows.select(np.array([i]))) for i in range(num_rows)])
    order = np.random.default_rng(0).permutation(num_rows)
    shuffled = sample(logits[torch.from_numpy(order)].clone(), rows.select(order))
    monkeypatch.setattr(reference, "_CPU_PIECE_ELEMENTS", 4000)
    in_pieces = sample(logits.clone(), rows)
    assert torch.equal(together, alone)
    assert torch.equal(together[torch.from_numpy(order)], shuffled)
    assert torch.equal(together, in_pieces)


def test_greedy_rows_take_the_most_probable_token() -> None:
    logits = torch.randn(9, 41, generator=torch.Generator().manual_seed(2))
    rows = rows_of(9, temperature=0.0)
    assert torch.equal(sample(logits.clone(), rows), logits.argmax(dim=-1))
    rows.parameters["temperature"][::2] = 1.0
    mixed = sample(logits.clone(), rows)
    assert torch.equal(mixed[1::2], logits.argmax(dim=-1)[1::2])


def test_uniforms_are_uniform_and_depend_on_seed_and_position() -> None:
    positions = np.arange(20_000)
    for seeds in (np.zeros(20_000, np.uint64), positions.astype(np.uint64)):
        drawn = uniforms(seeds, positions if seeds[1] == 0 else np.zeros_like(positions))
        assert drawn.min() >= 0
        assert drawn.max() < 1
        counts = np.bincount((drawn * 50).astype(int), minlength=50)
        chi_square = ((counts - 400) ** 2 / 400).sum()
        assert chi_square < 49 + CHI_SQUARE_SIGMAS * 98**0.5
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.05
    assert len(set(uniforms(np.full(4, 2**63 - 1, np.uint64), np.arange(4)))) == 4


def test_a_draw_never_falls_on_a_token_of_weight_zero() -> None:
    logits = torch.full((2, 600), float("-inf"))
    logits[:, 300] = 0.0
    rows = rows_of(2)
    assert sample(logits.clone(), rows).tolist() == [300, 300]
    cumulative = torch.zeros(2, 600, dtype=torch.float64)
    cumulative[:, 3:] = 0.7
    # Rounding may put the target of a number just below 1 at the total itself.
    target = torch.tensor([[0.0], [0.7]], dtype=torch.float64)
    assert reference._inverse_cdf(cumulative, target)[:, 0].tolist() == [3, 3]


@pytest.mark.parametrize(("num_output_tokens", "expected"), [(0, 4), (2, 4), (3, 5)])
def test_min_tokens_masks_ending_tokens(num_output_tokens: int, expected: int) -> None:
    request = Request(
        "r",
        [1, 1],
        SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[6]),
        max_model_len=50,
        eos_token_ids=frozenset({5}),
        output_token_ids=[1] * num_output_tokens,
    )
    table = SamplingTable(2)
    table.set_row(1, request)
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, 3.0, 2.0]])
    rows = table.select(np.array([1]), np.array([request.num_tokens]))
    assert sample(logits, rows).tolist() == [expected]
