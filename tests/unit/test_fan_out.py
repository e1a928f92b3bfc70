"""The requests that one for several answers becomes, and their streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import pytest

from penstock.producer.inputs.prompt import build_request
from penstock.producer.requests.fan_out import child_ids, children, merge
from penstock.producer.results import final_output
from penstock.shared.deployment.records import ModelCard
from penstock.shared.errors import PoisonRequestError, UnsupportedParameterError, ValidationError
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.params.sampling import MAX_N, MAX_SEED, SamplingParams, derived_seed

from ..processes import DEADLINE_S


def request(n: int, *, seed: int | None = 7, request_id: str = "r"):
    return build_request(
        "hi", SamplingParams(n=n, seed=seed, top_k=5), card=ModelCard(model="m"), options={"request_id": request_id}
    )


def params_of(child) -> SamplingParams:
    assert child.sampling_params is not None
    return child.sampling_params


def test_one_answer_is_the_request_itself() -> None:
    single = request(1)
    assert children(single) == [single]


def test_children_differ_from_the_request_in_id_n_and_seed_alone() -> None:
    whole = request(4)
    each = children(whole)
    assert [child.request_id for child in each] == ["r", "r~1", "r~2", "r~3"]
    assert [params_of(child).n for child in each] == [1] * 4
    for child in each:
        params_of(child).check_supported()
        as_asked = msgspec.structs.replace(params_of(child), n=4, seed=7)
        assert msgspec.structs.replace(child, request_id="r", sampling_params=as_asked) == whole


def test_only_one_child_computes_prompt_logprobs() -> None:
    whole = build_request("hi", SamplingParams(n=3, prompt_logprobs=2), card=ModelCard(model="m"))
    assert [params_of(child).prompt_logprobs for child in children(whole)] == [2, None, None]


def test_seeds_differ_are_in_range_and_follow_from_the_requests() -> None:
    for seed in (0, 1, 7, MAX_SEED):
        seeds = [params_of(child).seed for child in children(request(MAX_N, seed=seed))]
        assert seeds[0] == seed
        assert len(set(seeds)) == MAX_N
        assert all(one is not None and 0 <= one <= MAX_SEED for one in seeds)
        assert seeds == [derived_seed(seed, child) for child in range(MAX_N)]
    # Recorded: a repeated request gets the same answers from every version. 0xE220A8397B1DCDAF is SplitMix64's first.
    assert derived_seed(0, 1) == 0xE220A8397B1DCDAF >> 1
    assert derived_seed(7, 2) == 154844686297477902


def test_a_seed_is_drawn_once_for_all_children() -> None:
    seeds = [params_of(child).seed for child in children(request(3, seed=None))]
    assert seeds[0] is not None
    assert seeds == [derived_seed(seeds[0], child) for child in range(3)]


def test_ids_and_n_that_cannot_be_are_refused() -> None:
    assert child_ids("a~1", 1) == ["a~1"]
    with pytest.raises(ValidationError, match=r"request_id must not end in '~' and a number, .*got 'a~1'"):
        request(1, request_id="a~1")
    with pytest.raises(ValidationError, match=r"request_id must not end in '~' and a number, .*got 'a~1'"):
        child_ids("a~1", 2)
    longest = "x" * 200
    while True:  # the longest name a single request may have is too long for a child
        try:
            build_request("hi", None, card=ModelCard(model="m"), options={"request_id": longest + "x"})
        except ValidationError:
            break
        longest += "x"
    with pytest.raises(ValidationError, match="request_id must be a string of 1 to"):
        children(request(2, request_id=longest))
    for n in (0, MAX_N + 1, True, "2"):
        with pytest.raises(ValidationError, match=r"n must be in \[1, 64\]"):
            child_ids("r", n)  # type: ignore[arg-type]  # what a caller may pass by mistake


def test_unserved_parameters_are_refused_with_several_answers_too() -> None:
    with pytest.raises(UnsupportedParameterError, match=r"extra_args=\{'a': 1\} is not supported"):
        build_request("hi", SamplingParams(n=2, extra_args={"a": 1}), card=ModelCard(model="m"))


class Source:
    """A stream that continues at the test's command, and knows whether it was closed."""

    def __init__(self) -> None:
        self.next: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self.num_taken = 0
        self.is_closed = False

    def put(self, *deltas: Delta | Exception) -> Source:
        for delta in deltas:
            self.next.put_nowait(delta)
        return self

    async def stream(self) -> AsyncGenerator[Delta]:
        try:
            while True:
                item = await self.next.get()
                if isinstance(item, Exception):
                    raise item
                self.num_taken += 1
                yield item
                if item.finished:
                    return
        finally:
            self.is_closed = True


def token(index: int, *, end: FinishReason | None = None) -> Delta:
    return Delta(index=index, token_ids=[index], finish_reason=end)


async def test_a_merged_stream_has_every_delta_of_every_child_in_its_order() -> None:
    sources = [Source().put(*map(token, range(k)), token(k, end=FinishReason.LENGTH)) for k in (3, 0, 5)]
    deltas = [delta async for delta in merge([source.stream() for source in sources])]
    for child, num in enumerate((4, 1, 6)):
        mine = [delta for delta in deltas if delta.child == child]
        assert [delta.index for delta in mine] == list(range(num))
        assert [delta.finished for delta in mine] == [False] * (num - 1) + [True]
    assert all(source.is_closed for source in sources)


async def test_a_slow_child_holds_up_no_other() -> None:
    slow, fast = Source(), Source().put(*map(token, range(5)), token(5, end=FinishReason.STOP))
    async with asyncio.timeout(DEADLINE_S), aclosing(merge([slow.stream(), fast.stream()])) as merged:
        assert [(await anext(merged)).child for _ in range(6)] == [1] * 6
        slow.put(token(0, end=FinishReason.STOP))
        assert [delta.child async for delta in merged] == [0]


async def test_an_error_follows_the_received_deltas_and_closes_all() -> None:
    failing, other = Source(), Source()
    merged = merge([failing.stream(), other.stream()])
    other.put(token(0))
    assert (await anext(merged)).child == 1
    failing.put(token(0), PoisonRequestError("died of it"))
    assert (await anext(merged)).child == 0
    with pytest.raises(PoisonRequestError, match="died of it"):
        await anext(merged)
    assert failing.is_closed
    assert other.is_closed


async def test_leaving_closes_all_and_a_slow_caller_is_not_run_ahead_of() -> None:
    sources = [Source().put(*map(token, range(100))) for _ in range(3)]
    merged = merge([source.stream() for source in sources])
    for _ in range(3):
        await anext(merged)
    for _ in range(50):
        await asyncio.sleep(0)
    assert max(source.num_taken for source in sources) <= 3
    await merged.aclose()
    assert all(source.is_closed for source in sources)


def test_usage_counts_the_prompt_once_and_the_output_of_all() -> None:
    ends = [Delta(token_ids=[1] * k, finish_reason=FinishReason.STOP, usage=Usage(9, k, k)) for k in (2, 3)]
    output = final_output("r", "m", "hi", [*ends, Delta(finish_reason=FinishReason.CANCELLED)])
    assert output.usage == Usage(9, 5, 2)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert final_output("r", "m", "hi", [Delta(finish_reason=FinishReason.CANCELLED)]).usage is None


def test_bytes_from_before_there_were_children_still_decode() -> None:
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(token(3)))
    before = whole[: Delta.__struct_fields__.index("child")]
    assert before != whole
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=Delta) == token(3)
