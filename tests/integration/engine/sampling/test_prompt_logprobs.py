"""Log probabilities of prompts against transformers, in chunks, after preemptions, and told once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.shared.messages.outcome import TokenLogprobs
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.scheduling import chunking

from ..harness import request
from ..test_deterministic import CRAMPED

NUM_TOKENS = 5
TOLERANCE = 1e-3
ASKED = [0, 3, 20, None, 2, 1]


def requests_of(prompts: list[list[int]], delivered: dict[str, list[int]] | None = None) -> list[EngineCoreRequest]:
    return [
        request(str(i), prompt, (delivered or {}).get(str(i)), max_tokens=NUM_TOKENS, prompt_logprobs=ASKED[i])
        for i, prompt in enumerate(prompts)
    ]


def run(
    core: EngineCore, requests: list[EngineCoreRequest]
) -> tuple[dict[str, list[TokenLogprobs]], dict[str, list[int]]]:
    """Run requests together to their end; what each was told of its prompt, and its tokens."""
    told: dict[str, list[TokenLogprobs]] = {}
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for r in requests:
        assert core.add_request(r) is None
    while core.has_work:
        for output in core.step_fn():
            assert output.error is None
            if output.new_prompt_logprobs:
                assert not tokens[output.request_id], "it comes with the first token"
                assert output.request_id not in told, "it comes once"
                told[output.request_id] = output.new_prompt_logprobs
            tokens[output.request_id] += output.new_token_ids
    core.check_invariants()
    return told, tokens


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "MAX_PROMPT_ROWS", 7)


@pytest.mark.parametrize("options", [{}, CRAMPED, {"deterministic": True}], ids=str)
def test_they_are_those_of_transformers(
    options: dict[str, Any],
    model_folder: Callable[[str], Path],
    make_core: Callable[..., EngineCore],
    prompts: list[list[int]],
    few_rows: None,
) -> None:
    told, _ = run(make_core("llama", **options), requests_of(prompts))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"), attn_implementation="eager")
    # A prompt of one token has nothing to tell.
    assert sorted(told) == [str(i) for i, asked in enumerate(ASKED) if asked is not None and len(prompts[i]) > 1]
    for key, tokens in told.items():
        prompt = prompts[int(key)]
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], dim=-1)
        assert [token.token_id for token in tokens] == prompt[1:]
        for token, values in zip(tokens, expected, strict=True):
            best = values.topk(ASKED[int(key)] or 0).values.tolist()
            assert [value for _, value in token.top] == pytest.approx(best, abs=TOLERANCE)
            assert token.logprob == pytest.approx(values[token.token_id].item(), abs=TOLERANCE)
            margin = torch.cat([values[: token.token_id], values[token.token_id + 1 :]]) - values[token.token_id]
            if margin.abs().min() > TOLERANCE:
                assert token.rank == 1 + int((margin > 0).sum())


def test_prompt_logprobs_do_not_change_the_tokens(
    make_core: Callable[..., EngineCore], prompts: list[list[int]], few_rows: None
) -> None:
    core = make_core("llama")
    _, tokens = run(core, requests_of(prompts))
    _, plain = run(core, [request(str(i), prompt, max_tokens=NUM_TOKENS) for i, prompt in enumerate(prompts)])
    assert tokens == plain


def test_a_resumed_request_does_not_return_prompt_logprobs_again(
    make_core: Callable[..., EngineCore], prompts: list[list[int]]
) -> None:
    core = make_core("llama")
    _, tokens = run(core, requests_of(prompts))
    told, rest = run(core, requests_of(prompts, {key: output[:2] for key, output in tokens.items()}))
    assert told == {}
    assert {key: tokens[key][:2] + output for key, output in rest.items()} == tokens


def test_their_bits_do_not_depend_on_the_batch_in_deterministic_mode(
    make_core: Callable[..., EngineCore], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = make_core("llama", deterministic=True)
    cramped = make_core("llama", deterministic=True, **CRAMPED)
    alone: dict[str, list[TokenLogprobs]] = {}
    for r in requests_of(prompts):
        alone |= run(roomy, [r])[0]
    monkeypatch.setattr(chunking, "MAX_PROMPT_ROWS", 7)
    assert run(cramped, requests_of(prompts))[0] == alone
    assert run(roomy, requests_of(prompts)[::-1])[0] == alone
