"""Masks on logits, and the end of a request whose grammar fails."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.structured.constraint import FAILED, GrammarConstraint
from penstock.worker.engine.structured.grammar import Bitmask
from penstock.worker.engine.structured.table import GrammarMask, GrammarTable

EOS = 2


class FakeGrammar:
    """Allows a fixed set of tokens."""

    def __init__(self, allowed: Sequence[int], *, raises: str = "") -> None:
        self.allowed = list(allowed)
        self.raises = raises

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> None:
        if self.raises == "fill":
            raise RuntimeError("no mask today")
        bits = np.zeros(bitmask.shape[1] * 32, np.uint8)
        bits[self.allowed] = 1
        bitmask[row] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        if self.raises == "accept":
            raise RuntimeError("no token today")
        return all(token_id in self.allowed for token_id in token_ids)

    def forced_tokens(self, room: int) -> list[int]:
        raise NotImplementedError

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError

    def is_terminated(self) -> bool:
        return False


def constrained(grammar: FakeGrammar | None, vocab_size: int, **params: object) -> Request:
    structured = None if grammar is None else StructuredOutputsParams(regex="a")
    sampling_params = SamplingParams(structured_outputs=structured, max_tokens=50, **params)  # type: ignore[arg-type]
    request = Request("r", [1], sampling_params, max_model_len=99, eos_token_ids=frozenset([EOS]))
    if grammar is not None:
        request.constraint = GrammarConstraint("r", grammar, vocab_size, frozenset([EOS]))
    return request


def table_of(requests: list[Request]) -> GrammarTable:
    table = GrammarTable()
    for row, request in enumerate(requests):
        table.set_row(row, request)
    return table


def rows_and_positions(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(num_rows), np.zeros(num_rows, np.int64)


@pytest.mark.parametrize("vocab_size", [63, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_only_allowed_tokens_are_left(vocab_size: int, dtype: torch.dtype, device: str) -> None:
    rng = np.random.default_rng(0)
    allowed = [sorted(rng.choice(vocab_size, size, replace=False).tolist()) for size in (1, 7, vocab_size - 2)]
    grammars = [FakeGrammar(allowed[0]), None, FakeGrammar(allowed[1]), FakeGrammar(allowed[2])]
    table = table_of([constrained(grammar, vocab_size) for grammar in grammars])
    mask = table.select(*rows_and_positions(4))
    assert mask is not None
    logits = torch.randn(4, vocab_size, device=device).to(dtype)
    expected = logits.float().clone()
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            expected[row, [t for t in range(vocab_size) if t not in grammar.allowed]] = float("-inf")
    assert torch.equal(mask.apply(logits), expected)


def test_both_ways_to_apply_a_mask_are_one() -> None:
    rng = np.random.default_rng(1)
    bitmask = rng.integers(-(2**31), 2**31, (3, 4)).astype(np.int32)
    for rows in ([0, 1, 2], [4, 0, 3]):
        mask = GrammarMask(rows, bitmask, [])
        num_rows = max(rows) + 1
        logits = torch.randn(num_rows, 117)
        at_once = logits.clone()
        mask._apply_at_once(at_once)
        assert torch.equal(mask.apply(logits), at_once)


def test_a_step_without_grammars_has_no_mask() -> None:
    table = table_of([constrained(None, 64), constrained(FakeGrammar([5]), 64)])
    assert table.select(np.array([0]), np.array([0])) is None
    assert table.select(np.array([1]), np.array([0])) is not None
    table.forget_row(1)
    assert table.select(np.array([0, 1]), np.array([0, 0])) is None


def test_a_grammar_advances_with_its_row_s_tokens_and_not_beyond_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, ended = FakeGrammar([5, 6]), FakeGrammar([])
    monkeypatch.setattr(ended, "is_terminated", lambda: True)
    requests = [constrained(going_on, 64), constrained(None, 64), constrained(ended, 64)]
    table = table_of(requests)
    constraints = [request.constraint for request in requests]
    table.append_tokens(np.arange(3), np.array([5, 9, 9]))
    table.append_tokens(np.array([2, 0]), np.array([9, 6]))
    assert [constraint and constraint.failure for constraint in constraints] == [None] * 3
    table.append_tokens(np.array([0]), np.array([7]))
    assert constraints[0] is not None
    assert constraints[0].failure is not None
    assert "token 7" in constraints[0].failure.message


@pytest.mark.parametrize("raises", ["fill", "accept"])
def test_a_grammar_that_raises_fails_its_own_request(raises: str) -> None:
    good, bad = constrained(FakeGrammar([5]), 64), constrained(FakeGrammar([5], raises=raises), 64)
    mask = table_of([bad, good]).select(*rows_and_positions(2))
    assert mask is not None
    logits = mask.apply(torch.zeros(2, 64))
    assert torch.isneginf(logits[1]).sum() == 63
    assert good.constraint is not None
    assert bad.constraint is not None
    assert good.constraint.accept(5) is None
    error = bad.constraint.accept(5)
    assert error is not None
    assert (error.code, error.retryable) == (FAILED, False)
    assert "today" in error.message
    # It stays so.
    assert bad.constraint.accept(5) == error


def test_a_token_that_does_not_fit_fails_the_request() -> None:
    request = constrained(FakeGrammar([5]), 64)
    assert request.constraint is not None
    error = request.constraint.accept(6)
    assert error is not None
    assert "token 6" in error.message


@pytest.mark.parametrize(("allowed", "vocab_size"), [([], 64), ([], 63), ([63], 63)])
def test_a_grammar_that_allows_nothing_fails_the_request(allowed: list[int], vocab_size: int) -> None:
    request = constrained(FakeGrammar(allowed), vocab_size)
    assert table_of([request]).select(*rows_and_positions(1)) is None
    assert isinstance(request.constraint, GrammarConstraint)
    assert request.constraint.failure is not None
    assert request.constraint.failure.code == "validation_error"


def test_min_tokens_give_way_to_the_end_of_a_grammar() -> None:
    request = constrained(FakeGrammar([EOS]), 64, min_tokens=5)
    mask = table_of([request]).select(*rows_and_positions(1))
    assert mask is not None
    logits = torch.zeros(1, 64)
    logits[0, EOS] = float("-inf")  # as min_tokens has it
    applied = mask.apply(logits)
    assert applied.argmax().item() == EOS
    assert torch.isneginf(applied).sum() == 63


def test_nothing_left_by_other_parameters_fails_the_request() -> None:
    request = constrained(FakeGrammar([5, 6]), 64, allowed_token_ids=[7])
    mask = table_of([request]).select(*rows_and_positions(1))
    assert mask is not None
    logits = torch.full((1, 64), float("-inf"))
    logits[0, 7] = 0.0
    assert not torch.isneginf(mask.apply(logits)).all()
    assert request.constraint is not None
    error = request.constraint.accept(0)
    assert error is not None
    assert "allowed_token_ids" in error.message


def test_a_mask_that_takes_too_long_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    request = constrained(FakeGrammar([5]), 64)
    times = iter([0.0, 1.5])
    monkeypatch.setattr("penstock.worker.engine.structured.constraint.time.thread_time", lambda: next(times))
    assert table_of([request]).select(*rows_and_positions(1)) is None
    assert request.constraint is not None
    error = request.constraint.accept(5)
    assert error is not None
    assert "ambiguous" in error.message
