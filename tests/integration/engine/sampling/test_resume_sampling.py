"""What depends on the tokens so far goes on where a former engine stopped: penalties, min_tokens, log probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import TokenLogprobs
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.worker.engine.core.engine_core import EngineCore

from ..harness import request, run

NUM_TOKENS = 14
SMALLEST_LEAD = 1e-4
TOLERANCE = 1e-3
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.8}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "top_p": 0.95}
# Half of the vocabulary would end the request at once, were it not for min_tokens.
HELD_UP: dict[str, Any] = {"ignore_eos": False, "min_tokens": NUM_TOKENS - 2, "stop_token_ids": list(range(3, 60))}
KINDS = [
    {**PENALTIES, "logprobs": 3},
    {**PENALTIES, **SEEDED, "logprobs": 2},
    {**PENALTIES, **SEEDED, **HELD_UP, "logprobs": 0},
    {**SEEDED, **HELD_UP},
    {**PENALTIES, **HELD_UP, "logprobs": 20},
    {"logprobs": 5},
]
# So that everything is computed again, as on another engine.
UNCACHED = {"enable_prefix_caching": False}
# It preempts, and prefills long prompts in chunks of a few tokens.
CRAMPED = {"num_blocks": 20, "block_size": 4, "max_model_len": 80, "max_num_seqs": 6, "max_num_batched_tokens": 8}


def requests_of_every_kind(prompts: list[list[int]], delivered: dict[str, list[int]]) -> list[EngineCoreRequest]:
    return [
        request(str(i), prompts[i], delivered.get(str(i)), **{"max_tokens": NUM_TOKENS, **kind})
        for i, kind in enumerate(KINDS)
    ]


def resumed(
    core: EngineCore, prompts: list[list[int]], wholes: dict[str, EngineCoreOutput], num_delivered: int
) -> tuple[dict[str, EngineCoreOutput], dict[str, EngineCoreOutput]]:
    """All requests that have more than ``num_delivered`` tokens from there on: what should be, and what is."""
    longer = {key: whole for key, whole in wholes.items() if len(whole.new_token_ids) > num_delivered}
    given = {key: whole.new_token_ids[:num_delivered] for key, whole in longer.items()}
    rests = {
        key: EngineCoreOutput(
            key,
            whole.new_token_ids[num_delivered:],
            whole.finish_reason,
            whole.stop_reason,
            new_logprobs=whole.new_logprobs[num_delivered:],
        )
        for key, whole in longer.items()
    }
    again = [r for r in requests_of_every_kind(prompts, given) if r.request_id in longer]
    return rests, run(core, again)


def assert_as_asked(wholes: dict[str, EngineCoreOutput]) -> None:
    for key, kind in enumerate(KINDS):
        whole = wholes[str(key)]
        assert len(whole.new_token_ids) >= kind.get("min_tokens", NUM_TOKENS)
        if "logprobs" in kind:
            assert [token.token_id for token in whole.new_logprobs] == whole.new_token_ids
            assert {len(token.top) for token in whole.new_logprobs} == {kind["logprobs"]}
        else:
            assert whole.new_logprobs == []
    held_up = [token for whole in wholes.values() for token in whole.new_token_ids[:-2]]
    assert len(set(held_up)) > 20, "a model that repeats itself proves little"


def test_every_bit_is_the_same_after_every_token_in_deterministic_mode(
    make_core: Callable[..., EngineCore], prompts: list[list[int]]
) -> None:
    roomy = make_core("llama", deterministic=True, **UNCACHED)
    cramped = make_core("llama", deterministic=True, **CRAMPED, **UNCACHED)
    wholes: dict[str, EngineCoreOutput] = {}
    for alone in requests_of_every_kind(prompts, {}):
        wholes |= run(roomy, [alone])
    assert_as_asked(wholes)
    for num_delivered in range(NUM_TOKENS):
        for core in (roomy, cramped):
            expected, actual = resumed(core, prompts, wholes, num_delivered)
            assert actual == expected
    assert cramped.scheduler.stats().num_preemptions > 0


def test_the_tokens_are_the_same_after_every_token(
    make_core: Callable[..., EngineCore], prompts: list[list[int]]
) -> None:
    core, cramped = make_core("llama", **UNCACHED), make_core("llama", **CRAMPED, **UNCACHED)
    wholes = run(core, requests_of_every_kind(prompts, {}))
    assert_as_asked(wholes)
    for num_delivered in range(NUM_TOKENS):
        expected, actual = resumed(cramped if num_delivered % 2 else core, prompts, wholes, num_delivered)
        for key, rest in expected.items():
            assert actual[key].new_token_ids == rest.new_token_ids
            assert_close(actual[key].new_logprobs, rest.new_logprobs)


def assert_close(actual: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [(t.token_id, t.rank) for t in actual] == [(t.token_id, t.rank) for t in expected]
    assert [t.logprob for t in actual] == pytest.approx([t.logprob for t in expected], abs=TOLERANCE)
    for one, other in zip(actual, expected, strict=True):
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"device": "cuda", "gpu_memory_utilization": 0.1}, marks=pytest.mark.gpu)], ids=str
)
def test_repetition_penalty_and_log_probabilities_are_those_of_transformers(
    name: str,
    options: dict[str, Any],
    model_folder: Callable[[str], Path],
    make_core: Callable[..., EngineCore],
    prompts: list[list[int]],
) -> None:
    params = {"max_tokens": NUM_TOKENS, "repetition_penalty": 1.3, "logprobs": 4}
    wholes = run(make_core(name, **options), [request(str(i), prompt, **params) for i, prompt in enumerate(prompts)])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder(name), attn_implementation="eager")
    model.generation_config.eos_token_id = None
    for i, prompt in enumerate(prompts):
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            repetition_penalty=1.3,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.scores).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > SMALLEST_LEAD
        whole = wholes[str(i)]
        assert whole.new_token_ids == out.sequences[0, len(prompt) :].tolist()
        for token, logits in zip(whole.new_logprobs, out.logits, strict=True):
            expected = torch.log_softmax(logits[0], dim=-1)
            assert token.logprob == pytest.approx(expected[token.token_id].item(), abs=TOLERANCE)
            assert token.rank == 1 + int((expected > expected[token.token_id]).sum())
            for token_id, value in token.top:
                assert value == pytest.approx(expected[token_id].item(), abs=TOLERANCE)
            assert [value for _, value in token.top] == pytest.approx(expected.topk(4).values.tolist(), abs=TOLERANCE)
