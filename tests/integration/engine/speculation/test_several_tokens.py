"""A real model that gives several tokens of a request in a step: all that comes of it is as from one token a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason, RequestError
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.execution.model_runner import ModelRunner
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput

from ....conftest import DEMO_MODEL
from ..harness import request
from ..mixed_load import assert_equal, config, requests, run


class SeveralTokens:
    """An executor that runs a ``ModelRunner`` up to ``num_at_once`` times a step, for those requests that have room.

    A request has room while its last block has, it may have further tokens, and its grammar goes on.

    Args:
        drafts: what it runs beyond the first time counts as computed in the step, as if the step had guessed it.
    """

    def __init__(self, runner: ModelRunner, num_at_once: Callable[[Request], int], *, drafts: bool) -> None:
        self._runner = runner
        self._num_at_once = num_at_once
        self._guesses = drafts
        self.most_at_once = 0
        # As long as nothing raises, the tokens that came in a step behind one that ends the request.
        self.num_behind_ends = 0

    @property
    def device_memory_bytes(self) -> int:
        return self._runner.device_memory_bytes

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        sampled = self._runner.execute(output)
        wanted = {r.request_id: self._num_at_once(r) for r in output.requests}
        places = [place for place, token_ids in enumerate(sampled.token_ids) if token_ids]
        while places := [p for p in places if self._has_room(output.requests[p], sampled.token_ids[p], wanted)]:
            self._run_again(output, places, sampled)
        for place, token_ids in enumerate(sampled.token_ids):
            self.most_at_once = max(self.most_at_once, len(token_ids))
            ending = output.requests[place].ending_token_ids
            self.num_behind_ends += sum(token_id in ending for token_id in token_ids[:-1])
            if self._guesses and token_ids:
                output.num_new_tokens[place] += len(token_ids) - 1
        return sampled

    def _has_room(self, request: Request, token_ids: list[int], wanted: dict[str, int]) -> bool:
        num_tokens = request.num_tokens + len(token_ids)
        grammar = request.constraint
        return (
            len(token_ids) < wanted[request.request_id]
            and num_tokens <= len(request.block_table) * self._runner._batch.block_size
            and request.num_output_tokens + len(token_ids) < request.max_output_tokens
            and (grammar is None or (grammar.failure is None and not grammar.is_terminated))
        )

    def _run_again(self, output: SchedulerOutput, places: list[int], sampled: SampledTokens) -> None:
        """Compute one more token of the requests at ``places``, whose last one is the input."""
        again = [output.requests[place] for place in places]
        before = [request.num_computed_tokens for request in again]
        try:
            for place, request in zip(places, again, strict=True):
                request.num_computed_tokens = request.num_tokens + len(sampled.token_ids[place]) - 1
            found = self._runner.execute(SchedulerOutput(again, [1] * len(again)))
        finally:
            for request, num_computed_tokens in zip(again, before, strict=True):
                request.num_computed_tokens = num_computed_tokens
        for place, request, token_ids in zip(places, again, found.token_ids, strict=True):
            sampled.token_ids[place] += token_ids
            if request.request_id in found.logprobs:
                sampled.logprobs[request.request_id] += found.logprobs[request.request_id]


def core_of(**options: Any) -> EngineCore:
    """Build a core that gives a token a step."""
    return build_engine(config(**options), DEMO_MODEL).core


@cache
def from_one_token_a_step(*options: tuple[str, Any]) -> tuple[EngineCore, dict[str, EngineCoreOutput]]:
    """Return what ``requests`` become, and in which core."""
    core = core_of(**dict(options))
    return core, run(core, requests())


def core_of_several(*, drafts: bool, **options: Any) -> tuple[EngineCore, SeveralTokens]:
    """Return a core that generates one to five tokens per step, and its executor."""
    core = core_of(**options)
    assert isinstance(core._executor, ModelRunner)
    rng = random.Random(3)
    executor = SeveralTokens(core._executor, lambda request: rng.randint(1, 5), drafts=drafts)
    core._executor = executor
    return core, executor


@pytest.mark.parametrize("drafts", [False, True], ids=["known", "drafts"])
@pytest.mark.parametrize("options", [{}, {"scheduling_policy": "priority", "enable_prefix_caching": False}], ids=str)
def test_all_is_as_from_one_token_a_step(options: dict[str, Any], drafts: bool) -> None:
    """Covers penalties, grammars, log probabilities, minima, and too little KV cache for all requests."""
    plain, expected = from_one_token_a_step(*options.items())
    other, executor = core_of_several(drafts=drafts, **options)
    assert_equal(run(other, requests()), expected)
    stats = other.scheduler.stats()
    assert stats.num_preemptions > 0 < plain.scheduler.stats().num_preemptions
    assert stats.num_generation_tokens == plain.scheduler.stats().num_generation_tokens
    assert stats.step_counter < plain.scheduler.stats().step_counter
    assert executor.most_at_once == 5
    assert executor.num_behind_ends > 0


@pytest.mark.parametrize("drafts", [False, True], ids=["known", "drafts"])
def test_in_deterministic_mode_every_bit_is_as_from_one_token_a_step(drafts: bool) -> None:
    _, expected = from_one_token_a_step(("deterministic", True))
    other, _ = core_of_several(drafts=drafts, deterministic=True)
    assert run(other, requests()) == expected


def test_a_grammar_that_fails_at_a_later_token_of_a_step_ends_the_request_there() -> None:
    """The next token is a digit, which the grammar forbids: earlier tokens are delivered, then the error."""
    a = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).token_to_id("a")
    asked = request(
        "r", [5], logprobs=1, structured_outputs=StructuredOutputsParams(regex="a{4}[0-9]"), allowed_token_ids=[a]
    )
    ends: list[RequestError | None] = []
    for core in (core_of(), core_of_several(drafts=True)[0]):
        core.add_request(asked)
        whole = EngineCoreOutput("r")
        while core.has_work:
            for output in core.step_fn():
                whole.new_token_ids += output.new_token_ids
                whole.new_logprobs += output.new_logprobs
                whole.finish_reason, whole.error = output.finish_reason, output.error
        assert (whole.new_token_ids, len(whole.new_logprobs)) == ([a] * 4, 4)
        assert whole.finish_reason is FinishReason.ERROR
        ends.append(whole.error)
    assert ends[0] == ends[1] is not None
