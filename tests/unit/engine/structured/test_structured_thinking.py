"""A grammar behind a model's thinking: its beginning, whatever was delivered before, and the rules for thinking."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.params.sampling import SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.structured.constraint import new_bitmask
from penstock.worker.engine.structured.grammar import Bitmask
from penstock.worker.engine.structured.thinking import LaterConstraint, Thinking, thinking_of

EOS, START, END, A, B = 2, 31, 32, 5, 40
VOCAB_SIZE = 70


class OnlyA:
    """Allows A and the end, and remembers."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        self.token_ids += token_ids
        return all(token_id in (A, EOS) for token_id in token_ids)

    def fill_bitmask(self, bitmask: Bitmask, row: int) -> None:
        bits = np.zeros(bitmask.shape[1] * 32, np.uint8)
        bits[[A, EOS]] = 1
        bitmask[row] = np.packbits(bits, bitorder="little").view(np.int32)

    def forced_tokens(self, room: int) -> list[int]:
        return []

    def is_terminated(self) -> bool:
        return EOS in self.token_ids

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError


def begun(*prompt: int, delivered: Sequence[int] = ()) -> tuple[LaterConstraint, OnlyA]:
    thinking, grammar = Thinking(START, END, list(prompt)), OnlyA()
    grammar.accept_tokens([token_id for token_id in delivered if not thinking.takes(token_id)])
    return LaterConstraint("r", grammar, VOCAB_SIZE, frozenset([EOS]), thinking), grammar


def allowed(constraint: LaterConstraint) -> set[int]:
    bitmask = new_bitmask(1, VOCAB_SIZE)
    assert constraint.fill(bitmask, 0)
    return set(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little", count=VOCAB_SIZE)).tolist())


def test_the_first_token_is_of_the_grammar_or_begins_to_think() -> None:
    everything = set(range(VOCAB_SIZE))
    constraint, grammar = begun(A)
    assert allowed(constraint) == {A, EOS, START}
    assert constraint.accept(START) is None
    assert allowed(constraint) == everything - {EOS}
    for token_id in (B, START, END):
        assert constraint.accept(token_id) is None
    assert allowed(constraint) == {A, EOS}
    assert (constraint.accept(A), grammar.token_ids) == (None, [A])
    assert allowed(constraint) == {A, EOS}
    assert constraint.accept(EOS) is None
    assert constraint.is_terminated


def test_a_model_that_answers_at_once_does_not_think_later() -> None:
    constraint, _ = begun(A)
    constraint.accept(A)
    assert allowed(constraint) == {A, EOS}
    assert constraint.accept(START) is not None


@pytest.mark.parametrize(
    ("prompt", "is_inside"),
    [([START], True), ([A, START, B], True), ([START, B, END, A], False), ([START, END, START], True), ([END], False)],
)
def test_the_prompt_may_have_begun_it(prompt: list[int], is_inside: bool) -> None:
    constraint, _ = begun(*prompt)
    assert (B in allowed(constraint), EOS in allowed(constraint)) == (is_inside, not is_inside)


def test_the_end_of_thinking_may_end_the_request() -> None:
    thinking = Thinking(START, END, [START])
    constraint = LaterConstraint("r", OnlyA(), VOCAB_SIZE, frozenset([EOS, END]), thinking)
    assert allowed(constraint) == set(range(VOCAB_SIZE)) - {EOS}


@given(st.lists(st.sampled_from([A, B, START, END]), max_size=9), st.booleans(), st.integers(0, 9))
def test_a_resumed_request_stands_where_it_stood(tokens: list[int], is_begun: bool, num_delivered: int) -> None:
    prompt = [START] if is_begun else [A]
    whole = [START, *tokens] if is_begun else tokens
    thought = whole.index(END) + 1 if END in whole else len(whole)
    answer = whole[thought if whole[:1] == [START] else 0 :]
    constraint, grammar = begun(*prompt, delivered=tokens[:num_delivered])
    for token_id in tokens[num_delivered:]:
        if constraint.accept(token_id) is not None:
            break  # no word of the grammar
    assert grammar.token_ids == answer[: len(grammar.token_ids)]
    if constraint.failure is None:
        assert grammar.token_ids == answer


def test_only_requests_with_a_pending_grammar_think() -> None:
    def of(waits: bool | None, marks: tuple[int, int] | None) -> Thinking | None:
        params = SamplingParams(
            structured_outputs=StructuredOutputsParams(
                regex="a", enable_in_reasoning=None if waits is None else not waits
            ),
            think_token_ids=marks,
        )
        return thinking_of(Request("r", [A], params, max_model_len=9))

    assert of(True, (START, END)) is not None
    assert of(True, None) is of(False, (START, END)) is of(None, (START, END)) is None
