"""Guesses: their tokens and number, and that a request's results are the same as without them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.errors import ConfigurationError
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.drafting.drafters import NgramDrafter, PredictionDrafter
from penstock.worker.engine.drafting.speculation import NoMemory, Speculation
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.block_tables import SingleBlockTable
from penstock.worker.engine.scheduling.ordering import FirstComeFirstServed, OrderingPolicy, Priority
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler_output import SchedulerOutput
from penstock.worker.engine.structured.spelling import Spelling
from penstock.worker.engine.structured.vocabulary import Vocabulary
from penstock.worker.suffix_index import SuffixIndex

from ....oracle import Oracle
from ..paged_hash import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Arrival,
    alone,
    arrival,
    arrivals,
    make_core,
    message,
    run,
    verify,
)
from .always import Always


@given(
    load=st.lists(arrivals, max_size=6),
    num_blocks=st.integers(MAX_MODEL_LEN // BLOCK_SIZE, 20),
    max_num_seqs=st.integers(1, 5),
    policy=st.sampled_from([FirstComeFirstServed(), Priority()]),
    is_caching=st.booleans(),
    share=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_free_rows=st.integers(1, 12),
    failures=st.sets(st.integers(0, 20), max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_tokens_equal_those_without_speculation(
    load: list[Arrival],
    num_blocks: int,
    max_num_seqs: int,
    policy: OrderingPolicy,
    is_caching: bool,
    share: float,
    num_free_rows: int,
    failures: set[int],
) -> None:
    """The model's tokens are a hash of its cache, so a guess that stays in it shows."""
    outputs = {str(index): [7] * one.num_delivered + alone(one)[0] for index, one in enumerate(load)}
    speculation = Speculation(5, num_free_rows, NoMemory(Oracle(outputs, share, VOCAB_SIZE)))
    core, executor = make_core(
        num_blocks, max_num_seqs, 12, policy, is_caching=is_caching, is_ahead=False, drafting=speculation
    )
    executor.failures = {number: RuntimeError("boom") for number in failures}
    verify(load, run(core, load))
    stats = core.scheduler.stats()
    assert stats.num_accepted_tokens <= stats.num_draft_tokens


def oracle(token_ids: list[int]) -> Speculation:
    """Guesses these of the request "0", four at a time."""
    return Speculation(4, 5, NoMemory(Oracle({"0": token_ids}, 1.0, VOCAB_SIZE)))


def test_accepted_drafts_save_steps_and_are_counted() -> None:
    request = arrival(prompt=[5], max_tokens=20)
    whole, _ = alone(request)
    core, _ = make_core(is_ahead=False, drafting=oracle(whole))
    run(core, [request])
    stats = core.scheduler.stats()
    # Of 2, 4, 4, 4 drafts, and of one, behind which the last token comes.
    assert stats.step_counter == 5
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (15, 15)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_an_end_within_a_step_drops_the_rest(max_tokens: int) -> None:
    """The limit, a stop token, and one that ``min_tokens`` forbids as long as it holds."""
    whole, _ = alone(arrival(prompt=[5], max_tokens=12))
    stop = whole[4]
    first = whole.index(stop)
    for request in (
        arrival(prompt=[5], max_tokens=max_tokens),
        arrival(prompt=[5], max_tokens=12, stop_token_ids=[stop]),
        arrival(prompt=[5], max_tokens=12, stop_token_ids=[stop], min_tokens=max_tokens),
    ):
        core, _ = make_core(is_ahead=False, drafting=oracle(whole))
        outcome = run(core, [request])
        verify([request], outcome)
        if request.stop_token_ids and request.min_tokens <= first:
            assert outcome.tokens["0"] == whole[: first + 1]


def test_a_request_aborted_while_its_drafts_are_computed_has_no_output() -> None:
    whole, _ = alone(arrival(prompt=[5], max_tokens=20))
    core, executor = make_core(is_ahead=False, drafting=oracle(whole))
    core.add_request(message("0", arrival(prompt=[5], max_tokens=20)))
    core.step_fn()
    batch = core.scheduler.schedule()
    assert batch.drafts
    sampled = executor.execute(batch)
    core.abort_requests(["0"])
    assert core.scheduler.update_from_output(batch, sampled) == []
    core.check_invariants()
    assert core.scheduler.block_pool.num_free == core.scheduler.block_pool.num_blocks


def test_drafting_stops_once_rejected_drafts_cost_too_much() -> None:
    request = arrival(prompt=[5], max_tokens=20)
    wrong = [(token_id + 1) % VOCAB_SIZE for token_id in alone(request)[0]]
    core, _ = make_core(is_ahead=False, drafting=oracle(wrong))
    run(core, [request])
    stats = core.scheduler.stats()
    assert stats.step_counter == 20
    # 2 of them, and three times one; each step with drafts may have taken a quarter longer.
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (5, 0)


def decoding(request_id: str, num_tokens: int, block_pool: BlockPool, max_tokens: int = 50) -> Request:
    request = Request(request_id, [5] * num_tokens, SamplingParams(max_tokens=max_tokens), max_model_len=100)
    request.num_computed_tokens = num_tokens - 1
    request.block_table = block_pool.allocate(block_pool.blocks_for(num_tokens))
    return request


@pytest.mark.parametrize(
    ("num_requests", "num_prefilled", "expected"),
    [(1, 0, [2]), (2, 0, [2, 2]), (3, 0, [1, 1, 1]), (4, 0, [1, 1]), (6, 0, []), (9, 0, []), (1, 4, [1]), (1, 9, [])],
)
def test_requests_share_the_rows_that_a_step_leaves(num_requests: int, num_prefilled: int, expected: list[int]) -> None:
    pool, drafter, output = BlockPool(64, 16), Always(), SchedulerOutput()
    if num_prefilled:
        output.add(Request("prompt", [5] * 30, SamplingParams(), max_model_len=100), num_prefilled)
    for number in range(num_requests):
        output.add(decoding(str(number), 5, pool), 1)
    Speculation(4, 6, NoMemory(drafter)).extend(output, SingleBlockTable(pool))
    assert drafter.rooms == expected
    assert [len(drafts) for drafts in output.drafts.values()] == expected
    assert sum(output.num_new_tokens) == num_prefilled + num_requests + sum(expected)


def test_drafts_take_no_needed_block_and_end_at_the_last_token() -> None:
    for num_blocks, expected in ((2, 1), (4, 1), (5, 2)):
        pool, output = BlockPool(num_blocks, 8), SchedulerOutput()
        output.add(decoding("r", 7, pool), 1)
        output.add(decoding("other", 8, pool), 1)
        Speculation(4, 6, NoMemory(Always())).extend(output, SingleBlockTable(pool))
        assert len(output.drafts[0]) == expected
        assert pool.num_free == num_blocks - 2 - (expected - 1)
    pool, output = BlockPool(4, 8), SchedulerOutput()
    output.add(decoding("r", 3, pool, max_tokens=3), 1)
    Speculation(4, 6, NoMemory(Always())).extend(output, SingleBlockTable(pool))
    assert output.drafts == {0: [9, 9]}


def asked_with(prompt: list[int], output: list[int], prediction: list[int] | None = None) -> Request:
    return Request(
        "r", prompt, SamplingParams(max_tokens=None), max_model_len=100, output_token_ids=output, prediction=prediction
    )


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([1, 2, 9, 3, 2, 8, 1, 2], [9, 3, 2, 8]),
        ([3, 1, 2, 5, 1, 2, 6, 3, 1, 2], [5, 1, 2, 6]),
        ([1, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2, 6]),
        ([7, 7, 7], [7, 7, 7, 7]),
        ([4, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
    ids=["once", "two tokens at least", "longest match", "latest match", "one", "two", "none", "too short"],
)
def test_an_ngram_continues_as_before(token_ids: list[int], expected: list[int]) -> None:
    request = asked_with(token_ids[:1], [])
    drafter = NgramDrafter(request)
    for token_id in token_ids[1:]:
        drafter.draft(request, 4)  # it reads each token once
        request.token_ids.append(token_id)
    assert drafter.draft(request, 4) == expected
    assert NgramDrafter(request).draft(request, 4) == expected


@given(token_ids=st.lists(st.integers(0, 3), max_size=40), num_first=st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_the_index_finds_where_the_last_tokens_were(token_ids: list[int], num_first: int) -> None:
    growing = token_ids[:num_first]
    index = SuffixIndex(growing)
    index.find(growing)
    growing += token_ids[num_first:]
    drafts, pair = index.find(growing), growing[-2:]
    places = [i for i in range(2, len(growing)) if growing[i - 2 : i] == pair]
    assert (drafts is None) == (not places)
    assert drafts is None or drafts in places


def test_a_prediction_is_followed_from_its_start_and_after_a_deviation() -> None:
    request = asked_with([50, 51], [], [1, 2, 3, 4, 5, 6, 7, 8])
    drafter = PredictionDrafter(request.prediction or [])
    assert drafter.draft(request, 3) == [1, 2, 3]
    request.token_ids += [1, 2]
    assert drafter.draft(request, 3) == [3, 4, 5]
    request.token_ids += [3, 30]
    assert drafter.draft(request, 3) == []
    request.token_ids += [5, 6]
    assert drafter.draft(request, 3) == [7, 8]
    request.token_ids += [7, 8]
    assert drafter.draft(request, 3) == []


def test_a_resumed_output_is_located_in_its_prediction() -> None:
    request = asked_with([50], [1, 2, 3], [1, 2, 3, 4, 5])
    assert PredictionDrafter([1, 2, 3, 4, 5]).draft(request, 4) == [4, 5]


def test_forced_text_is_spelt_with_long_tokens() -> None:
    spelling = Spelling(Vocabulary([b"", b"a", b"b", b"ab", b"abb", b"a"], [0]))
    assert spelling.tokens_of(b"abbaab", 10) == [4, 1, 3]
    assert spelling.tokens_of(b"abbaab", 2) == [4, 1]
    assert spelling.tokens_of(b"ab?a", 10) == [3]
    assert spelling.tokens_of(b"", 10) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative": "ngrams"}, "must be one of off, ngram, suffix"),
        ({"speculative": "off:3"}, "must be 'off' without a number"),
        ({"speculative": "ngram:0"}, "a whole number in [1, 64]"),
        ({"speculative": "suffix:65"}, "a whole number in [1, 64]"),
        ({"speculative": "ngram:"}, "a whole number in [1, 64]"),
        ({"speculative": "ngram", "async_scheduling": True}, "async_scheduling exclude each other"),
        ({"speculative": "ngram", "engine": "vllm"}, "give engine vllm its own options"),
    ],
)
def test_impossible_values_are_refused_by_name(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        EngineConfig(model="m", **options)  # type: ignore[arg-type]
    assert "speculative" in str(refused.value)
    assert words in str(refused.value)


def test_maximum_number_of_drafts() -> None:
    assert [EngineConfig(model="m", speculative=s).max_draft_tokens for s in ("off", "ngram", "suffix:3")] == [0, 15, 3]


def test_a_request_that_left_is_forgotten() -> None:
    core, _ = make_core(is_ahead=False, drafting=(speculation := Speculation(4, 5)))
    core.add_request(message("r", arrival(max_tokens=8)))
    while core.has_work:
        core.step_fn()
    core.add_request(message("next", arrival(max_tokens=1)))
    core.step_fn()
    assert "r" not in speculation._request_drafts
