"""Whatever way the answers of a request are cut into deltas, the three kinds of output tell the same."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer import CompletionOutput, Delta, FinishReason, RequestOutput, RequestOutputKind, TokenLogprobs
from penstock.producer.requests.output_stream import outputs_of
from penstock.shared.errors import ClientClosedError
from penstock.shared.messages.deltas import SegmentEnd
from penstock.shared.messages.outcome import Usage


@st.composite
def cut_answers(draw: st.DrawFn) -> tuple[int, list[Delta]]:
    """``n`` answers, each cut into deltas at random places; in the order in which they might arrive."""
    n, has_logprobs = draw(st.integers(1, 4)), draw(st.booleans())
    waiting: list[list[Delta]] = []
    for child in range(n):
        sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
        deltas, index = [], 0
        for number, size in enumerate(sizes):
            token_ids = list(range(index, index + size))
            delta = Delta(index=index, token_ids=token_ids, text=draw(st.text("ab", max_size=3)), child=child)
            if has_logprobs:
                delta.logprobs = [TokenLogprobs(token_id, -0.1 * (token_id + 1), 1, []) for token_id in token_ids]
            if child == 0 and number == 0 and has_logprobs:
                delta.prompt_logprobs = [TokenLogprobs(9, -1.5, 2, [])]
            index += size
            deltas.append(delta)
        deltas[-1].finish_reason, deltas[-1].stop_reason = FinishReason.STOP, child
        deltas[-1].usage = Usage(num_prompt_tokens=4, num_output_tokens=index)
        waiting.append(deltas)
    arrived: list[Delta] = []
    while any(waiting):
        arrived.append(draw(st.sampled_from([deltas for deltas in waiting if deltas])).pop(0))
    return n, arrived


def collected(kind: RequestOutputKind, n: int, deltas: list[Delta]) -> list[RequestOutput]:
    async def stream() -> AsyncGenerator[Delta]:
        for delta in deltas:
            yield copy.deepcopy(delta)  # a caller may change the outputs of its reader

    async def all_of_it() -> list[RequestOutput]:
        # An output stays as it was given out: it is looked at only when all has come.
        return [output async for output in outputs_of(stream(), kind, "m", "r", "hi", n=n)]

    return asyncio.run(all_of_it())


def joined(parts: list[CompletionOutput]) -> CompletionOutput:
    whole = CompletionOutput(index=parts[0].index, text="", token_ids=[])
    for part in parts:
        if part.token_ids:
            starts = [len(whole.text)] if whole.token_ids else []
            ends = [len(whole.text) + end for end in part.text_ends]
            whole.text_ends = [*whole.text_ends, *starts, *ends]
        whole.text += part.text
        whole.token_ids = whole.token_ids + part.token_ids
        whole.logprobs = [*(whole.logprobs or []), *(part.logprobs or [])] or None
        whole.cumulative_logprob = part.cumulative_logprob
        whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
    return whole


def same(one: CompletionOutput, other: CompletionOutput) -> bool:
    """Sums of logarithms that were added in another order are equal but for their last bits."""
    sums = one.cumulative_logprob, other.cumulative_logprob
    rest = [msgspec.structs.replace(answer, cumulative_logprob=None) for answer in (one, other)]
    return rest[0] == rest[1] and sums[0] == (None if sums[1] is None else pytest.approx(sums[1]))


@given(cut_answers())
def test_the_three_kinds_agree(cut: tuple[int, list[Delta]]) -> None:
    n, deltas = cut
    (final,) = collected(RequestOutputKind.FINAL_ONLY, n, deltas)
    pieces = collected(RequestOutputKind.DELTA, n, deltas)
    growing = collected(RequestOutputKind.CUMULATIVE, n, deltas)
    assert final.finished
    for items in (pieces, growing):
        assert len(items) == len(deltas)
        assert [item.finished for item in items] == [False] * (len(items) - 1) + [True]
        assert [item.usage for item in items] == [None] * (len(items) - 1) + [final.usage]
        assert [len(item.outputs) for item in items] == [1] * len(items)
        values = [item.prompt_logprobs for item in items if item.prompt_logprobs]
        assert (values[-1] if values else None) == final.prompt_logprobs
    for answer in final.outputs:
        mine = [item.outputs[0] for item in pieces if item.outputs[0].index == answer.index]
        assert [part.finished for part in mine] == [False] * (len(mine) - 1) + [True]
        whole = [item.outputs[0] for item in growing if item.outputs[0].index == answer.index]
        for number, snapshot in enumerate(whole):
            assert same(snapshot, joined(mine[: number + 1]))
        assert same(joined(mine), answer)


def test_a_stream_that_is_left_without_an_end_is_no_result() -> None:
    ended = Delta(token_ids=[1], finish_reason=FinishReason.STOP)
    for kind in RequestOutputKind:
        with pytest.raises(ClientClosedError, match="request 'r' was left without an end"):
            collected(kind, 2, [ended])


def test_ends_of_segments_are_delivered() -> None:
    ends = [SegmentEnd(0, 1, FinishReason.STOP), SegmentEnd(1, 2, FinishReason.LENGTH)]
    deltas = [Delta(index=i, token_ids=[i], segment_ends=[end]) for i, end in enumerate(ends)]
    deltas.append(Delta(index=2, finish_reason=FinishReason.STOP))
    values = [item.outputs[0].segment_ends for item in collected(RequestOutputKind.DELTA, 1, deltas)]
    assert values == [[ends[0]], [ends[1]], []]
