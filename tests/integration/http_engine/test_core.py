"""A core and a server that speaks a dialect: tokens, ends, refusals and deaths, without queue and processes of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.shared.errors import ConfigurationError, EngineDeadError
from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import RepetitionDetectionParams, SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.other_engines.http.core import HttpCore
from penstock.worker.other_engines.http.server import find_server, open_client
from penstock.worker.other_engines.http.streams import ServerStreams

from .conftest import TestServer
from .dialect_server import ACCENTS, EOS, FAILURE, LEAD, MISTAKE, NUM_SLOTS, SLOT_TOKENS, TAIL, VOCAB_SIZE, next_token

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("http_core")]
DIALECTS = ("llama", "sglang", "sglang-incremental")
PROMPT = [70, 71, 72]
LONG = 40
ServerOf = Callable[[str], TestServer]


@contextmanager
def core_of(server: TestServer) -> Iterator[HttpCore]:
    with open_client(server.url) as client:
        dialect, facts = find_server(client)
    lost: list[str] = []
    streams = ServerStreams(server.url, lost.append)
    core = HttpCore(
        dialect,
        streams,
        max_model_len=facts.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS],
        kv_cache_size_tokens=facts.kv_cache_size_tokens,
    )
    try:
        yield core
    finally:
        streams.close()
    assert lost == []


def expected(prompt: list[int], number: int, grammar: str = "", *, ignore_eos: bool = True) -> list[int]:
    known = list(prompt)
    while len(known) < len(prompt) + number and (ignore_eos or known[-1] != EOS or known == prompt):
        known.append(next_token(known, len(prompt), grammar, ignore_eos=ignore_eos))
    return known[len(prompt) :]


def request(request_id: str, prompt: list[int], delivered: list[int] | None = None, **values: Any) -> EngineCoreRequest:
    values = {"temperature": 0.0, "max_tokens": LONG, "ignore_eos": True, **values}
    params = SamplingParams(**values)
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=params, output_token_ids=delivered
    )


def run(core: HttpCore, *messages: EngineCoreRequest) -> dict[str, EngineCoreOutput]:
    """All outputs of each request, as one."""
    told = {message.request_id: EngineCoreOutput(message.request_id) for message in messages}
    outputs = [output for message in messages if (output := core.add_request(message)) is not None]
    while outputs or core.has_work:
        for output in outputs:
            whole = told[output.request_id]
            assert not whole.finished
            whole.new_token_ids += output.new_token_ids
            whole.new_logprobs += output.new_logprobs
            whole.num_cached_tokens = max(whole.num_cached_tokens, output.num_cached_tokens)
            whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
            whole.error = output.error
        outputs = core.step_fn() if core.has_work else []
    core.check_invariants()
    return told


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tokens_and_ends(server_of: ServerOf, dialect: str) -> None:
    whole = expected(PROMPT, LONG)
    with core_of(server_of(dialect)) as core:
        told = run(
            core,
            request("length", PROMPT),
            request("resumed", PROMPT, whole[:7]),
            request("complete", PROMPT, whole),
            request("eos", PROMPT, ignore_eos=False, max_tokens=400),
            request("stop", PROMPT, stop_token_ids=[whole[9]]),
            request("logprobs", PROMPT, logprobs=1, max_tokens=3),
        )
    assert (told["length"].new_token_ids, told["length"].finish_reason) == (whole, FinishReason.LENGTH)
    assert told["length"].num_cached_tokens == 1
    assert (told["resumed"].new_token_ids, told["resumed"].finish_reason) == (whole[7:], FinishReason.LENGTH)
    assert (told["complete"].new_token_ids, told["complete"].finish_reason) == ([], FinishReason.LENGTH)
    eos = expected(PROMPT, 400, ignore_eos=False)
    assert eos[-1] == EOS
    assert (told["eos"].new_token_ids, told["eos"].finish_reason) == (eos, FinishReason.STOP)
    stopped = whole[: whole.index(whole[9]) + 1]
    assert (told["stop"].new_token_ids, told["stop"].stop_reason) == (stopped, whole[9])
    first = told["logprobs"].new_logprobs[0]
    assert len(told["logprobs"].new_logprobs) == 3
    # The chosen one is the second, so its rank is beyond what is told.
    assert (first.token_id, first.logprob, first.rank, first.top) == (whole[0], -1.5, 2, [(whole[0] + 1, -0.5)])


def test_tokens_that_a_stream_leaves_out(server_of: ServerOf) -> None:
    """Covers tokens that end within a character, in the middle, at the end and in a grammar: none is missing."""
    server, prompt = server_of("llama"), [ACCENTS, 70]
    whole = expected(prompt, LONG)
    assert whole.count(LEAD) > 2
    last = whole.index(LEAD) + 1
    with core_of(server) as core:
        told = run(
            core, request("all", prompt, logprobs=0), request("cut", prompt, max_tokens=last), request("plain", PROMPT)
        )
    assert told["all"].new_token_ids == whole
    assert [one.token_id for one in told["all"].new_logprobs] == whole
    assert told["cut"].new_token_ids == whole[:last]
    assert whole[last] == TAIL
    assert told["plain"].new_token_ids == expected(PROMPT, LONG)
    # What has no such characters is one call, streamed to its end.
    plain = [call for call in server.calls() if call["body"]["prompt"] == PROMPT and call["body"]["n_predict"] == LONG]
    assert plain
    assert all(call["body"]["stream"] for call in plain)


def test_a_resumed_request_replays_its_grammar(server_of: ServerOf) -> None:
    """The server generates from the start: delivered tokens must be equal and are not sent twice."""
    grammar = StructuredOutputsParams(json_object=True)
    whole = expected(PROMPT, 20, '{"type": "object"}')
    with core_of(server_of("llama")) as core:
        told = run(
            core,
            request("fresh", PROMPT, structured_outputs=grammar, max_tokens=20),
            request("resumed", PROMPT, whole[:6], structured_outputs=grammar, max_tokens=20, logprobs=0),
            request("other", PROMPT, [whole[0], whole[1] + 1], structured_outputs=grammar, max_tokens=20),
        )
    assert told["fresh"].new_token_ids == whole
    assert told["resumed"].new_token_ids == whole[6:]
    assert [one.token_id for one in told["resumed"].new_logprobs] == whole[6:]
    assert (told["other"].new_token_ids, told["other"].finish_reason) == ([], FinishReason.ERROR)
    assert told["other"].error is not None
    assert (told["other"].error.code, told["other"].error.retryable) == ("other_tokens", True)


@pytest.mark.parametrize("dialect", ["llama", "sglang"])
def test_a_mistake_ends_its_request_alone(server_of: ServerOf, dialect: str) -> None:
    with core_of(server_of(dialect)) as core:
        told = run(core, request("mistaken", PROMPT, logit_bias={5: MISTAKE}), request("other", PROMPT))
    assert told["mistaken"].error is not None
    assert told["mistaken"].error.message.endswith("refuses the request: that is no bias")
    assert told["other"].new_token_ids == expected(PROMPT, LONG)


def test_a_failure_ends_the_core(server_of: ServerOf) -> None:
    with (
        core_of(server_of("llama")) as core,
        pytest.raises(EngineDeadError, match=r"^llama-server: the batch failed$"),
    ):
        run(core, request("failing", PROMPT, logit_bias={5: FAILURE}))


def test_an_abort_closes_the_stream(server_of: ServerOf) -> None:
    server, prompt = server_of("sglang"), [90, 91]
    server.hold_at(5)
    with core_of(server) as core:
        assert core.add_request(request("aborted", prompt)) is None
        token_ids: list[int] = []
        while len(token_ids) < 5:
            token_ids += [token_id for output in core.step_fn() for token_id in output.new_token_ids]
        core.abort_requests(["aborted", "unknown"])
        assert not core.has_work
        core.check_invariants()
        # Still held: what has ended was cut.
        (call,) = [call for call in server.ended_calls() if call["body"]["input_ids"] == prompt]
        assert call["end"] == "cut"
        server.hold_at(None)
        run(core, request("next", [91, 90]))


def test_repetitions_are_sought_here(server_of: ServerOf) -> None:
    """Delivered tokens are included."""
    delivered = [70, 71, 70, 71]
    sought = RepetitionDetectionParams(max_pattern_size=2, min_count=2)
    with core_of(server_of("llama")) as core:
        told = run(core, request("r", PROMPT, delivered, repetition_detection=sought))
    assert (told["r"].new_token_ids, told["r"].finish_reason) == ([], FinishReason.REPETITION)


@pytest.mark.parametrize("dialect", ["llama", "sglang"])
def test_slots_and_context_length_are_read_from_the_server(server_of: ServerOf, dialect: str) -> None:
    with open_client(server_of(dialect).url) as client:
        _, facts = find_server(client)
    assert (facts.num_slots, facts.max_model_len) == (NUM_SLOTS, SLOT_TOKENS)
    assert facts.kv_cache_size_tokens == NUM_SLOTS * SLOT_TOKENS


def test_another_server_is_refused(server_of: ServerOf) -> None:
    with (
        open_client(server_of("other").url) as client,
        pytest.raises(ConfigurationError, match=r"neither llama-server .* 404\) nor SGLang .* 404\)"),
    ):
        find_server(client)
