"""Rules about tokens, thinking budgets and repetition with real models, also where another engine had begun."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import RepetitionDetectionParams, SamplingParams
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.text.tokenizer import TextCodec

from ....conftest import DEMO_MODEL
from ..harness import VOCAB_SIZE, generate, request, run
from ..test_deterministic import CRAMPED

NUM_TOKENS = 16
ALLOWED = list(range(20, 60))
# Not in the prompts.
START, END = 0, 1
# Most pairs among a third of the vocabulary.
PAIRS = [list(pair) for pair in itertools.product(range(0, VOCAB_SIZE, 3), repeat=2) if sum(pair) % 2]
SEEDED: dict[str, Any] = {"temperature": 1.2, "seed": 3, "top_p": 0.95}
KINDS: list[dict[str, Any]] = [
    {"allowed_token_ids": ALLOWED, **SEEDED},
    {"bad_words_token_ids": PAIRS, "logit_bias": dict.fromkeys(range(0, VOCAB_SIZE, 3), 6.0)},
    {"bad_words_token_ids": PAIRS, "logit_bias": dict.fromkeys(range(0, VOCAB_SIZE, 3), 6.0), **SEEDED},
    {"thinking_token_budget": 4, "think_token_ids": (START, END), "logit_bias": {START: 14.0, END: -100.0}, **SEEDED},
    {"allowed_token_ids": ALLOWED[:3], "repetition_penalty": 1.1, **SEEDED},
    {
        "allowed_token_ids": [30, 31],
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=4),
        **SEEDED,
    },
]


def requests_of_every_kind(prompts: list[list[int]], delivered: dict[str, list[int]]) -> list[EngineCoreRequest]:
    return [
        request(str(i), prompts[i], delivered.get(str(i)), **{"max_tokens": NUM_TOKENS, **kind})
        for i, kind in enumerate(KINDS)
    ]


def assert_as_asked(wholes: dict[str, EngineCoreOutput]) -> None:
    tokens = [wholes[str(kind)].new_token_ids for kind in range(len(KINDS))]
    assert set(tokens[0]) <= set(ALLOWED)
    assert len(set(tokens[0])) > 4
    for output in tokens[1:3]:
        assert sum(token_id % 3 == 0 for token_id in output) > NUM_TOKENS // 2
        assert not any(list(pair) in PAIRS for pair in itertools.pairwise(output))
    assert END in tokens[3]
    assert tokens[3].index(END) - tokens[3].index(START) == 5
    assert set(tokens[4]) == set(ALLOWED[:3])
    assert wholes["5"].finish_reason is FinishReason.REPETITION
    assert wholes["5"].stop_reason == "repetition_detected"
    assert len(tokens[5]) < NUM_TOKENS


def test_token_rules_hold_and_resumed_requests_give_the_same_tokens(
    make_core: Callable[..., EngineCore], prompts: list[list[int]]
) -> None:
    roomy = make_core("llama", deterministic=True)
    cramped = make_core("llama", deterministic=True, **CRAMPED)
    wholes: dict[str, EngineCoreOutput] = {}
    for alone in requests_of_every_kind(prompts, {}):
        wholes |= run(roomy, [alone])
    assert_as_asked(wholes)
    for num_delivered in range(0, NUM_TOKENS, 2):
        longer = {key: whole for key, whole in wholes.items() if len(whole.new_token_ids) > num_delivered}
        given = {key: whole.new_token_ids[:num_delivered] for key, whole in longer.items()}
        again = [r for r in requests_of_every_kind(prompts, given) if r.request_id in longer]
        rests = run(roomy if num_delivered % 4 else cramped, again)
        assert {key: given[key] + rest.new_token_ids for key, rest in rests.items()} == {
            key: whole.new_token_ids for key, whole in longer.items()
        }
        assert all(rest.finish_reason is longer[key].finish_reason for key, rest in rests.items())
    assert cramped.scheduler.stats().num_preemptions > 0


def test_rules_hold_in_the_ordinary_engine(make_core: Callable[..., EngineCore], prompts: list[list[int]]) -> None:
    assert_as_asked(run(make_core("llama"), requests_of_every_kind(prompts, {})))


def test_an_output_that_had_repeated_itself_when_its_engine_died_ends_at_once(
    make_core: Callable[..., EngineCore], prompts: list[list[int]]
) -> None:
    core = make_core("llama")
    answer = core.add_request(request("r", prompts[0], [30, 30, 30, 30], **KINDS[5]))
    assert answer == EngineCoreOutput("r", [], FinishReason.REPETITION, "repetition_detected")


@pytest.fixture(scope="module")
def demo() -> tuple[EngineCore, TextCodec]:
    config = EngineConfig(model=str(DEMO_MODEL), num_threads=1)
    return build_engine(config, DEMO_MODEL).core, TextCodec.load(DEMO_MODEL)


def test_words_are_kept_out_of_a_text(demo: tuple[EngineCore, TextCodec]) -> None:
    core, codec = demo

    def ask(delivered: list[int], **params: Any) -> list[int]:
        message = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=codec.encode("count from four to nine:"),
            sampling_params=codec.complete(SamplingParams(temperature=0.0, max_tokens=24, **params)),
            output_token_ids=delivered,
        )
        return delivered + generate(core, [message])["r"]

    def text_of(token_ids: list[int]) -> str:
        detokenizer = codec.detokenizer(skip_special_tokens=True)
        return detokenizer.add(token_ids) + detokenizer.flush()

    counted = ask([])
    assert text_of(counted) == " four five six seven eight nine."
    for num_delivered in range(3):
        words = text_of(ask(counted[:num_delivered], bad_words=["six", "nine", "nine."])).split()
        assert words[:2] == ["four", "five"]
        assert not {"six", "nine", "nine."} & set(words)
