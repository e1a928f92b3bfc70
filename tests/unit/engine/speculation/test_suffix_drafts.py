"""Guesses from outputs of other requests: those of one tenant and salt, within bounds, and no others."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.drafting.drafters import SharedTexts, SuffixDrafter, SuffixMemory
from penstock.worker.engine.drafting.speculation import Speculation
from penstock.worker.engine.scheduling.request import Request

from ..paged_hash import arrival, make_core, message

MINE, SALTED, OTHERS = ("tenant", None), ("tenant", "salt"), ("other", None)
TEXT = [11, 12, 13, 14, 15, 16, 17]


def request(token_ids: list[int], scope: tuple[str | None, ...] = MINE) -> Request:
    return Request("r", token_ids, SamplingParams(max_tokens=None), max_model_len=500, extra_keys=scope)


def test_outputs_are_drafted_only_within_a_tenant_and_salt() -> None:
    texts = SharedTexts()
    texts.learn(MINE, TEXT)
    tokens = [40, 11, 12, 13]
    assert SuffixDrafter(request(tokens), texts).draft(request(tokens), 3) == [14, 15, 16]
    assert SuffixDrafter(request(tokens), texts).draft(request(tokens), 9) == [14, 15, 16, 17]
    for scope in (SALTED, OTHERS, ("tenant", ""), (None, None)):
        assert SuffixDrafter(request(tokens, scope), texts).draft(request(tokens, scope), 3) == []


def test_the_longer_match_counts_and_its_own_where_both_are_as_long() -> None:
    texts = SharedTexts()
    texts.learn(MINE, [5, 11, 12, 13, 80, 81])
    for tokens, expected in (
        ([12, 13, 70, 9, 11, 12, 13], [80, 81]),
        ([11, 12, 13, 70, 9, 11, 12, 13], [70, 9]),
        ([9, 12, 13], []),
        ([7, 7, 7], [7, 7]),
    ):
        assert SuffixDrafter(request(tokens), texts).draft(request(tokens), 2) == expected


def test_a_draft_ends_with_its_source() -> None:
    texts = SharedTexts()
    texts.learn(MINE, TEXT)
    texts.learn(MINE, [90, 91, 92])
    assert texts.find(MINE, TEXT[-3:], 4) == ([], 0)
    assert texts.find(MINE, [15, 16], 4) == ([17], 2)
    assert texts.find(MINE, [17, 90], 4) == ([], 0)


@given(
    learnt=st.lists(st.tuples(st.sampled_from([MINE, SALTED, OTHERS]), st.lists(st.integers(0, 9), max_size=60))),
    max_tokens=st.integers(8, 120),
)
@settings(max_examples=100, deadline=None)
def test_memory_is_bounded_and_keeps_the_latest_outputs(
    learnt: list[tuple[tuple[str | None, ...], list[int]]], max_tokens: int
) -> None:
    texts = SharedTexts(max_tokens)
    for number, (scope, token_ids) in enumerate(learnt):
        marked = [*token_ids, 1000 + number, 2000, 3000]
        texts.learn(scope, marked)
        num_tokens = sum(len(half.token_ids) for halves in texts._scopes.values() for half in halves)
        assert num_tokens == texts.num_tokens <= max_tokens
        for other in (MINE, SALTED, OTHERS):
            if max_tokens >= 32:
                drafts = texts.find(other, [1000 + number, 2000], 2)
                assert drafts == (([3000], 2) if other == scope else ([], 0))
    texts.clear()
    assert texts.num_tokens == 0
    assert texts.find(MINE, [1000, 2000], 2) == ([], 0)


def test_a_scope_cannot_drive_out_the_others() -> None:
    texts = SharedTexts(400)
    texts.learn(OTHERS, TEXT)
    for number in range(100):
        texts.learn(MINE, [number + 100] * 20)
    assert texts.find(OTHERS, TEXT[:3], 1) == ([14], 3)
    assert texts.num_tokens <= 110


def test_an_engine_drafts_from_earlier_outputs_until_its_cache_is_reset() -> None:
    """The same request a second time takes fewer steps; one of another tenant does not."""
    memory = SuffixMemory()
    core, _ = make_core(is_ahead=False, drafting=Speculation(8, 9, memory))

    def num_steps(name: str, tenant: str, salt: str | None = None) -> int:
        requests: EngineCoreRequest = message(name, arrival(prompt=[5, 6], max_tokens=20, ignore_eos=True))
        requests.tenant, requests.cache_salt = tenant, salt
        before = core.scheduler.stats().step_counter
        core.add_request(requests)
        outputs = []
        while core.has_work:
            outputs += core.step_fn()
        tokens.add(tuple(token for output in outputs for token in output.new_token_ids))
        return core.scheduler.stats().step_counter - before

    tokens: set[tuple[int, ...]] = set()
    alone = num_steps("first", "a")
    assert num_steps("again", "a") < alone
    assert num_steps("other", "b") == num_steps("salted", "a", "salt") == alone
    assert memory.texts.num_tokens > 0
    assert core.reset_prefix_cache()
    assert memory.texts.num_tokens == 0
    assert len(tokens) == 1
