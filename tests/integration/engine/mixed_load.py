"""Requests that want all sorts of things, too many for the KV cache, and what an engine makes of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import RepetitionDetectionParams, SamplingParams
from penstock.shared.params.structured import StructuredOutputsParams
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.core.engine_core import EngineCore

from ...conftest import DEMO_MODEL

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": [*range(20, 60)]},
    {"temperature": 0.7, "bad_words": ["a"], "bad_words_token_ids": [[30], [40, 41]], "logit_bias": {50: 2.0}},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.2, "repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_count=3)},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[ab]{2}[0-9]{1,9}x"), "max_tokens": 40},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(choice=["yes", "no", "perhaps"])},
]


# Eight requests that are admitted one behind the other, and of which somebody is preempted whatever the tokens are, as
# long as a step gives nobody more than eight: when the first of them has its last token, in its tenth step or later, it
# has 6 of the cache's 16 blocks, and the others, of which the last came two steps later, two each at the least.
NUM_TOO_MANY = 8
NUM_TOO_MANY_PROMPT_TOKENS, NUM_TOO_MANY_OUTPUT_TOKENS = 15, 80
# These end with their first token, whatever the model makes of their prompts.
NUM_ENDING_AT_ONCE = 6
CERTAIN_TOKEN = 50


def config(**options: Any) -> EngineConfig:
    """Too little cache for all, 16 blocks of 16 tokens; long prompts come in chunks."""
    fields: dict[str, Any] = {
        "model": str(DEMO_MODEL),
        "num_threads": 1,
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 48,
        "kv_cache_memory": 16 * 16 * 2048,
    }
    return EngineConfig(**fields | options)


def requests() -> list[EngineCoreRequest]:
    """Build more requests than the cache holds, some that end at once, and four of each kind, some of them begun."""
    rng = random.Random(6)
    made = too_many()
    for number in range(4 * len(KINDS)):
        fields = {"max_tokens": rng.randint(6, 30), "ignore_eos": number % 3 > 0, "seed": number, **KINDS[number % 10]}
        is_begun = "structured_outputs" not in fields and rng.random() < 0.3
        made.append(
            EngineCoreRequest(
                request_id=str(number),
                prompt_token_ids=[rng.randrange(3, 300) for _ in range(rng.randint(1, 70))],
                output_token_ids=[rng.randrange(60, 300) for _ in range(rng.randint(1, 4))] if is_begun else None,
                sampling_params=SamplingParams(**fields),
            )
        )
    return made


def too_many() -> list[EngineCoreRequest]:
    rng = random.Random(7)
    certain: dict[str, Any] = {"temperature": 0.0, "logit_bias": {CERTAIN_TOKEN: 100.0}, "ignore_eos": True}
    wanted: list[dict[str, Any]] = [{"max_tokens": NUM_TOO_MANY_OUTPUT_TOKENS}] * NUM_TOO_MANY
    wanted += [{"stop_token_ids": [CERTAIN_TOKEN]}] * NUM_ENDING_AT_ONCE
    return [
        EngineCoreRequest(
            request_id=f"certain-{number}",
            prompt_token_ids=[rng.randrange(60, 300) for _ in range(NUM_TOO_MANY_PROMPT_TOKENS)],
            sampling_params=SamplingParams(**certain, **fields),
        )
        for number, fields in enumerate(wanted)
    ]


def run(core: EngineCore, late: list[EngineCoreRequest]) -> dict[str, EngineCoreOutput]:
    """Serve ``late``, three of which enter with every step; what each was given."""
    wholes = {new.request_id: EngineCoreOutput(new.request_id) for new in late}
    while late or core.has_work:
        outputs = [refused for new in late[:3] if (refused := core.add_request(new)) is not None]
        late = late[3:]
        for output in [*outputs, *(core.step_fn() if core.has_work else [])]:
            assert output.error is None, output.error
            whole = wholes[output.request_id]
            assert whole.finish_reason is None, "an ended request spoke"
            whole.new_token_ids = whole.new_token_ids + output.new_token_ids
            whole.new_logprobs = whole.new_logprobs + output.new_logprobs
            whole.new_prompt_logprobs = whole.new_prompt_logprobs + output.new_prompt_logprobs
            whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
        core.check_invariants()
    return wholes


def assert_equal(found: dict[str, EngineCoreOutput], expected: dict[str, EngineCoreOutput]) -> None:
    """The same tokens and ends; log probabilities up to rounding, since batches differ."""
    for request_id, whole in expected.items():
        other = found[request_id]
        assert (other.new_token_ids, other.finish_reason, other.stop_reason) == (
            whole.new_token_ids,
            whole.finish_reason,
            whole.stop_reason,
        )
        for mine, theirs in (
            (other.new_logprobs, whole.new_logprobs),
            (other.new_prompt_logprobs, whole.new_prompt_logprobs),
        ):
            assert [told.token_id for told in mine] == [told.token_id for told in theirs]
            assert [told.logprob for told in mine] == pytest.approx([told.logprob for told in theirs], abs=1e-3)
