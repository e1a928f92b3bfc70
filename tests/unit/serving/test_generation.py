"""A caller's output, however outputs are gathered into deltas, and whichever way the request ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from penstock.shared.broker import Claim
from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, RequestError, TokenLogprobs, Usage
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.stats import RequestStats
from penstock.worker.serving.requests.generation import Generation
from penstock.worker.serving.requests.segments import Segment
from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.detokenizer import IncrementalDetokenizer
from penstock.worker.text.tokenizer import TextCodec


@pytest.fixture
def generation() -> Generation:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1] * 20,
        sampling_params=SamplingParams(max_tokens=3, detokenize=False),
        epoch=1,
    )
    codec = cast(Any, None)  # asked for a detokenizer only
    return Generation(Segment(request, []), codec, Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1))


def test_cached_tokens_are_reported_with_the_end(generation: Generation) -> None:
    generation.absorb(EngineCoreOutput("r", [5], num_cached_tokens=16))
    first = generation.pop_delta()
    assert first is not None
    assert first.usage is None
    last, _ = generation.absorb(EngineCoreOutput("r", [6], FinishReason.LENGTH, num_cached_tokens=16))
    assert last is not None
    assert last.usage == Usage(num_prompt_tokens=20, num_output_tokens=2, num_cached_tokens=16)


def test_an_end_without_tokens_forgets_none(generation: Generation) -> None:
    generation.absorb(EngineCoreOutput("r", [5], num_cached_tokens=16))
    error = RequestError("engine_step_failed", "boom", True)
    failed, _ = generation.absorb(EngineCoreOutput("r", finish_reason=FinishReason.ERROR, error=error))
    assert failed is not None
    assert failed.usage == Usage(20, 1, 16)


def test_a_deadline_forgets_none(generation: Generation) -> None:
    generation.absorb(EngineCoreOutput("r", [5], num_cached_tokens=16))
    assert generation.cut_off(FinishReason.EXPIRED).usage == Usage(20, 1, 16)


def test_only_the_first_delta_of_an_engine_has_its_weights_version() -> None:
    """An engine that continues another's output names its version, too; the last delta has both."""
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1] * 20,
        sampling_params=SamplingParams(max_tokens=9, detokenize=False),
        epoch=2,
    )
    begun = Delta(token_ids=[5], weights_version="one", stats=RequestStats())
    claim = Claim("r", b"", epoch=2, num_logged_tokens=1, attempt=2)
    generation = Generation(Segment(request, [begun]), cast(Any, None), claim, "two")
    deltas = []
    for token_id in (6, 7):
        generation.absorb(EngineCoreOutput("r", [token_id]))
        deltas.append(generation.pop_delta())
    last, _ = generation.absorb(EngineCoreOutput("r", [8], FinishReason.LENGTH))
    versions = [(delta.index, delta.weights_version) for delta in (*deltas, last) if delta is not None]
    assert versions == [(1, "two"), (2, ""), (3, "")]
    assert deltas[0] is not None
    assert begun.followed_by(deltas[0]).weights_version == "two"


@pytest.fixture(scope="module")
def codec(demo_model: Path) -> TextCodec:
    return TextCodec.load(demo_model)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_text_is_that_of_the_whole_however_it_is_gathered(codec: TextCodec, data: st.DataObject) -> None:
    text = data.draw(st.text("ab déjà 日本🙂", max_size=24))
    token_ids = codec.encode(text + "x")
    stop = data.draw(st.sampled_from([None, "b", "a d", "日"]))
    params = SamplingParams(max_tokens=99, seed=1, stop=[stop] if stop else None)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, epoch=1)
    generation = Generation(Segment(request, []), codec, Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1))
    deltas = []
    for number, token_id in enumerate(token_ids):
        end = FinishReason.LENGTH if number == len(token_ids) - 1 else None
        output = EngineCoreOutput("r", [token_id], end)
        generation.timing.note_output(output, float(number))
        delta, stop_core = generation.absorb(output)
        if delta is None and data.draw(st.booleans()):
            delta = generation.pop_delta()
        if delta is not None:
            deltas.append(delta)
        if generation.finished:
            assert stop_core == (end is None)
            break
    whole = codec.detokenizer(skip_special_tokens=True)
    expected = whole.add(token_ids) + whole.flush()
    expected = expected.partition(stop)[0] if stop else expected
    assert "".join(delta.text for delta in deltas) == expected
    assert [token_id for delta in deltas for token_id in delta.token_ids] == token_ids[: deltas[-1].next_index]
    assert [delta.index for delta in deltas] == [0, *(delta.next_index for delta in deltas[:-1])]
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].stop_reason == (stop if stop and stop in text + "x" else None)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("ab déj日🙂", max_size=16), data=st.data())
def test_resumed_engine_sends_only_the_missing_text(codec: TextCodec, text: str, data: st.DataObject) -> None:
    """Deltas are merged during a call to Redis, and the first engine dies after any of them."""
    stop = data.draw(st.sampled_from([None, ["d x"], ["日本"], ["🙂🙂🙂"]]))
    token_ids = codec.encode(text + "x")
    params = SamplingParams(max_tokens=99, seed=1, stop=stop)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, epoch=1)

    def tell(logged: list[Delta]) -> Iterator[Delta]:
        """Yield the tokens that ``logged`` does not have, for its caller to append."""
        generation = Generation(
            Segment(request, [*logged]), codec, Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1)
        )
        start = generation.num_resumed_tokens
        for number, token_id in enumerate(token_ids[start:], start=start):
            output = EngineCoreOutput("r", [token_id], FinishReason.LENGTH if number == len(token_ids) - 1 else None)
            delta, _ = generation.absorb(output)
            if delta is None and data.draw(st.booleans()):
                delta = generation.pop_delta()
            if delta is not None:
                yield delta
            if generation.finished:
                return

    logged: list[Delta] = []
    for delta in itertools.islice(tell([]), data.draw(st.integers(0, len(token_ids)))):
        if logged and data.draw(st.booleans()):
            logged[-1] = logged[-1].followed_by(delta)
        else:
            logged.append(delta)
    rest = [] if logged and logged[-1].finished else [*tell(logged)]
    whole = [*tell([])]
    assert "".join(delta.text for delta in logged + rest) == "".join(delta.text for delta in whole)


def test_a_log_is_decoded_in_one_call(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a death the new engine replays the logs of all requests before they continue."""
    token_ids = codec.encode("nine eight seven six five")
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=99, seed=1), epoch=1
    )
    detokenizer = codec.detokenizer([1], skip_special_tokens=True)
    logged = [Delta(index=i, token_ids=[each], text=detokenizer.add([each])) for i, each in enumerate(token_ids)]
    decoded: list[list[int]] = []
    add = IncrementalDetokenizer.add

    def record(self: IncrementalDetokenizer, token_ids: list[int]) -> str:
        decoded.append(token_ids)
        return add(self, token_ids)

    monkeypatch.setattr(IncrementalDetokenizer, "add", record)
    Generation(Segment(request, logged), codec, Claim("r", b"", epoch=1, num_logged_tokens=9, attempt=2))
    assert [each for each in decoded if set(each) & set(token_ids)] == [token_ids]


def test_the_token_that_ends_it_is_a_sign_and_no_text(codec: TextCodec) -> None:
    params = SamplingParams(max_tokens=99, seed=1)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, epoch=1)
    generation = Generation(Segment(request, []), codec, Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1))
    a, b, end = (codec.encode(letter)[-1] for letter in "abz")
    assert generation.absorb(EngineCoreOutput("r", [a])) == (None, False)
    assert generation.absorb(EngineCoreOutput("r", [b])) == (None, False)
    delta, _ = generation.absorb(EngineCoreOutput("r", [end], FinishReason.STOP))
    assert delta is not None
    whole = codec.detokenizer(skip_special_tokens=True)
    assert delta.text == whole.add([a, b]) + whole.flush()
    assert delta.token_ids == [a, b, end]


STOPS = st.sampled_from([None, ["b"], ["a d"], ["日"], ["éj", "ab"], ["🙂🙂"]])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("ab déj日🙂", max_size=24), stop=STOPS, include=st.booleans(), data=st.data())
def test_several_tokens_of_a_step_are_delivered_like_single_ones(
    codec: TextCodec, text: str, stop: list[str] | None, include: bool, data: st.DataObject
) -> None:
    """A stop string may begin in one step and end in the middle of another's: text behind it is not delivered."""
    token_ids = codec.encode(text + "x")
    params = SamplingParams(max_tokens=99, seed=1, stop=stop, include_stop_str_in_output=include, logprobs=0)
    reason = data.draw(st.sampled_from([FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR]))
    num_resumed = data.draw(st.integers(0, len(token_ids) - 1)) if stop is None else 0
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, epoch=1)

    def tell(sizes: list[int]) -> tuple[Delta, bool]:
        """Return the delivered deltas of the tokens, which come in steps of these sizes, and whether the core stops."""
        logged = [Delta(token_ids=token_ids[:num_resumed])] if num_resumed else []
        generation = Generation(
            Segment(request, logged), codec, Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1)
        )
        whole, start = Delta(index=num_resumed), num_resumed
        for size in sizes:
            new = token_ids[start : start + size]
            start += size
            output = EngineCoreOutput("r", new, new_logprobs=[TokenLogprobs(t, -0.5, 1, []) for t in new])
            if start >= len(token_ids):
                output.finish_reason = reason
                output.error = RequestError("failed", "") if reason is FinishReason.ERROR else None
            ends_in_core = output.finished
            delta, stop_core = generation.absorb(output)
            assert generation.num_output_tokens <= start
            whole = whole if delta is None else whole.followed_by(delta)
            if generation.finished:
                assert stop_core == (not ends_in_core)
                return msgspec.structs.replace(whole, stats=None), stop_core
        raise AssertionError("it does not end")

    num_left = len(token_ids) - num_resumed
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=num_left, max_size=num_left))
    result, expected = tell(sizes)[0], tell([1] * num_left)[0]
    assert result == expected
    assert result.usage is not None
    assert len(result.logprobs) == len(result.token_ids) == result.usage.num_output_tokens - num_resumed
    assert (result.error is None) == (result.finish_reason is not FinishReason.ERROR)


def test_tokens_after_a_stop_string_in_a_step_are_dropped(codec: TextCodec) -> None:
    """Beginning in one step, ending in the next, which was the last that the core had for it."""
    token_ids = [codec.encode(letter)[-1] for letter in "xxabxx"]
    params = SamplingParams(max_tokens=99, seed=1, stop=["ab"])
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, epoch=1)
    generation = Generation(Segment(request, []), codec, Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1))
    assert generation.absorb(EngineCoreOutput("r", token_ids[:3])) == (None, False)
    error = RequestError("failed", "")
    delta, stop_core = generation.absorb(EngineCoreOutput("r", token_ids[3:], FinishReason.ERROR, error=error))
    assert delta is not None
    assert not stop_core
    assert (delta.text.strip(), delta.token_ids) == ("xx", token_ids[:4])
    assert (delta.finish_reason, delta.stop_reason, delta.error) == (FinishReason.STOP, "ab", None)
    assert delta.usage == Usage(1, 4, 0)
    assert generation.num_output_tokens == 4


def a_step(generation: Generation, *token_ids: int) -> None:
    output = EngineCoreOutput("r", [*token_ids], num_cached_tokens=16)
    generation.timing.note_output(output, time.monotonic())
    generation.absorb(output)


def test_a_prompt_is_counted_once_with_its_first_token(generation: Generation) -> None:
    assert generation.pop_prompt_counts() == (0, 0)
    a_step(generation, 5)
    assert generation.pop_prompt_counts() == (20, 16)
    a_step(generation, 6)
    assert generation.pop_prompt_counts() == (0, 0)


def test_resumed_requests_and_later_segments_count_only_uncounted_tokens() -> None:
    params = SamplingParams(max_tokens=9, detokenize=False)
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1] * 20, sampling_params=params, epoch=1)
    claim, codec = Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1), cast(Any, None)
    resumed = Generation(Segment(request, [Delta(token_ids=[4], stats=RequestStats())]), codec, claim)
    a_step(resumed, 5)
    assert resumed.pop_prompt_counts() == (0, 0), "the engine that made its first token has counted it"
    # Its prompt is a chunk of 8, 5 tokens of output, and a chunk of 7.
    segment = Segment(request, [], number=1, num_former_tokens=5, num_former_prompt_tokens=8)
    later = Generation(segment, codec, claim)
    a_step(later, 5)
    assert later.pop_prompt_counts() == (7, 7)


@pytest.fixture(scope="module")
def spaced_codec() -> TextCodec:
    """Codec as of Llama 2: a mark begins each word, and the space of the first is stripped."""
    words = ["▁", "▁the", "▁capital", "▁is", "▁Paris", "P", "aris", "."]
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextCodec(tokenizer, None)


CAPITAL = [1, 4, 5, 6]  # "the capital is"


def tell_text(
    codec: TextCodec, prompt: list[int], output: list[int], logged: list[Delta], params: SamplingParams
) -> list[Delta]:
    """Return the deltas of ``output`` behind those in ``logged``."""
    request = EngineCoreRequest(request_id="r", prompt_token_ids=prompt, sampling_params=params, epoch=1)
    claim = Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1)
    generation = Generation(Segment(request, [*logged]), codec, claim)
    deltas = []
    for token_id in output[generation.num_resumed_tokens :]:
        delta, _ = generation.absorb(
            EngineCoreOutput("r", [token_id], new_logprobs=[TokenLogprobs(token_id, -0.5, 1, [])])
        )
        delta = delta or generation.pop_delta()
        deltas += [delta] if delta is not None else []
        if generation.finished:
            return deltas
    return [*deltas, generation.cut_off(FinishReason.LENGTH)]


def test_a_text_begins_with_the_space_that_follows_its_prompt(spaced_codec: TextCodec) -> None:
    params = SamplingParams(max_tokens=9, logprobs=0)
    deltas = tell_text(spaced_codec, CAPITAL, [7, 10, 4], [], params)
    assert "".join(delta.text for delta in deltas) == " Paris. the"
    tokens = [token.texts[0] for delta in deltas for token in delta.logprobs]
    assert b"".join(tokens) == b" Paris. the"
    # A word that continues has none, and an output that begins a text has none either.
    assert "".join(delta.text for delta in tell_text(spaced_codec, [*CAPITAL, 8], [9, 10], [], params)) == "aris."
    assert "".join(delta.text for delta in tell_text(spaced_codec, [1], [7, 10], [], params)) == "Paris."


@pytest.mark.parametrize("num_logged", range(1, 5))
def test_resumed_engine_sends_the_same_text_after_a_prompt(spaced_codec: TextCodec, num_logged: int) -> None:
    params, output = SamplingParams(max_tokens=9), [7, 10, 4, 3]
    logged = tell_text(spaced_codec, CAPITAL, output, [], params)[:num_logged]
    rest = tell_text(spaced_codec, CAPITAL, output, logged, params)
    assert "".join(delta.text for delta in logged + rest) == " Paris. the "


def test_a_log_of_a_release_that_dropped_the_space_is_continued(spaced_codec: TextCodec) -> None:
    logged = [Delta(token_ids=[7], text="Paris", stats=RequestStats()), Delta(index=1, token_ids=[10], text=".")]
    rest = tell_text(spaced_codec, CAPITAL, [7, 10, 4, 5], logged, SamplingParams(max_tokens=9))
    assert "".join(delta.text for delta in rest) == " the capital"


def test_the_first_delta_reports_whether_the_prompt_ends_in_thinking(demo_model: Path) -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ '<think>' if thinking else '</think>' }}", {})
    codec = TextCodec(Tokenizer.from_file(str(demo_model / "tokenizer.json")), template)
    messages = [{"role": "user", "content": "hi"}]
    claim = Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1)
    for is_thinking in (True, False):
        prompt = codec.encode_chat(messages, {"thinking": is_thinking})
        request = EngineCoreRequest(
            request_id="r", prompt_token_ids=prompt, messages=messages, sampling_params=SamplingParams(), epoch=1
        )
        for logged, expected in (([], is_thinking), ([Delta(token_ids=[5], stats=RequestStats())], None)):
            generation = Generation(Segment(request, logged), codec, claim)
            generation.absorb(EngineCoreOutput("r", [6]))
            delta = generation.pop_delta()
            assert delta is not None
            assert delta.begins_in_reasoning is expected
    assert tell_text(codec, prompt, [5], [], SamplingParams())[0].begins_in_reasoning is None, "it is no chat"


def test_the_first_delta_counts_the_prompt(spaced_codec: TextCodec) -> None:
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=CAPITAL, sampling_params=SamplingParams(max_tokens=9), epoch=1
    )
    claim = Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1)
    generation = Generation(Segment(request, []), spaced_codec, claim)
    generation.absorb(EngineCoreOutput("r", [6], num_cached_tokens=2))
    first = generation.pop_delta()
    assert first is not None
    assert first.prompt_usage == Usage(len(CAPITAL), 0, 2)
    generation.absorb(EngineCoreOutput("r", [6]))
    second = generation.pop_delta()
    assert second is not None
    assert second.prompt_usage is None
    assert first.followed_by(second).prompt_usage == Usage(len(CAPITAL), 0, 2)
    first.extend(second)
    assert first.prompt_usage == Usage(len(CAPITAL), 0, 2)


def test_a_stop_string_may_begin_with_that_space(spaced_codec: TextCodec) -> None:
    params = SamplingParams(max_tokens=9, stop=[" Paris"])
    deltas = tell_text(spaced_codec, CAPITAL, [7, 10, 4], [], params)
    assert ("".join(delta.text for delta in deltas), deltas[-1].stop_reason) == ("", " Paris")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("ab1", max_size=14), min_tokens=st.integers(0, 12), data=st.data())
def test_a_stop_string_counts_once_there_are_min_tokens(
    codec: TextCodec, text: str, min_tokens: int, data: st.DataObject
) -> None:
    """The text of a later token must complete it, as in vLLM, also where another engine has begun the output."""
    stop = data.draw(st.sampled_from(["a", "b1", "aa", "1a1"]))
    token_ids = codec.encode(text + "!", add_special_tokens=False)
    params = SamplingParams(max_tokens=99, min_tokens=min_tokens, seed=1, stop=[stop])
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, epoch=1)
    num_logged = data.draw(st.integers(0, len(token_ids) - 1))
    deltas: list[Delta] = []

    def run(rest: list[int], last: FinishReason | None) -> None:
        claim = Claim("r", b"", epoch=1, num_logged_tokens=0, attempt=1)
        generation = Generation(Segment(request, [*deltas]), codec, claim)
        while rest and not generation.finished:
            num_tokens = data.draw(st.integers(1, 3))
            step, rest = rest[:num_tokens], rest[num_tokens:]
            delta, _ = generation.absorb(EngineCoreOutput("r", step, None if rest else last))
            if (delta := delta or generation.pop_delta()) is not None:
                deltas.append(delta)

    run(token_ids[:num_logged], None)
    if not any(delta.finished for delta in deltas):
        run(token_ids[num_logged:], FinishReason.LENGTH)

    output, num_tokens, stopped_at = "", 0, None
    for num_tokens, token_id in enumerate(token_ids, start=1):
        num_before = len(output)
        output += codec.token_bytes[token_id].decode()
        at = output.find(stop, max(0, num_before + 1 - len(stop)))
        if num_tokens > min_tokens and at >= 0:
            output, stopped_at = output[:at], stop
            break
    assert "".join(delta.text for delta in deltas) == output
    assert deltas[-1].next_index == num_tokens
    assert deltas[-1].stop_reason == stopped_at
