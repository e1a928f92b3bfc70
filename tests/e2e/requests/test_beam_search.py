"""Beam search over real requests, against transformers' own on the same weights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import LLM, BeamSearchParams, Client
from penstock.shared import errors
from penstock.worker.text.tokenizer import TextCodec

pytestmark = pytest.mark.xdist_group("deployment")

PROMPT = "count from four to"
CODEC = TextCodec.load(MODEL)


def found_by_transformers(prompt: str, width: int, num_tokens: int) -> list[tuple[list[int], float]]:
    model: Any = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    token_ids = torch.tensor([CODEC.encode(prompt)])
    with torch.inference_mode():
        output = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    pairs = zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True)
    return [(tokens[token_ids.shape[1] :], score) for tokens, score in pairs]


@pytest.mark.parametrize(("width", "num_tokens"), [(2, 6), (4, 9)])
async def test_the_sequences_are_those_of_transformers(client: Client, width: int, num_tokens: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True, length_penalty=0.0)
    expected = await asyncio.to_thread(found_by_transformers, PROMPT, width, num_tokens)
    (output,) = await client.beam_search(PROMPT, params)
    assert [one.output_token_ids for one in output.sequences] == [tokens for tokens, _ in expected]
    assert [one.cum_logprob for one in output.sequences] == pytest.approx([score for _, score in expected], abs=1e-3)
    for one in output.sequences:
        assert one.text == CODEC.decode(one.output_token_ids, skip_special_tokens=False)
        assert one.tokens[: one.num_prompt_tokens] == CODEC.encode(PROMPT)


async def test_a_search_ends_where_the_model_does_and_several_run_at_once(client: Client) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=12)
    prompts = ["spell 7:", CODEC.encode("spell 40:"), [{"role": "user", "content": "spell 12:"}]]
    outputs = await client.beam_search(prompts, params, concurrency_limit=2)
    assert [output.sequences[0].text for output in outputs] == [" seven.", " forty.", " twelve."]
    assert [output.sequences[0].finish_reason for output in outputs] == ["stop"] * 3
    assert [output.prompt for output in outputs] == prompts
    assert outputs[0].sequences[0].cum_logprob > outputs[0].sequences[1].cum_logprob


async def test_all_steps_have_the_time_of_the_search(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    generate, requests = client.generate, list[tuple[Any, Any]]()

    async def generate_and_note(*args: Any, **options: Any) -> Any:
        requests.append((options.get("deadline"), options.get("timeout_s")))
        return await generate(*args, **options)

    monkeypatch.setattr(client, "generate", generate_and_note)
    await client.beam_search(PROMPT, params, timeout_s=1000)
    assert len(requests) == 1 + 2 + 2
    assert requests[0][0] is not None
    assert set(requests) == {(requests[0][0], None)}
    with pytest.raises(errors.RequestFailedError, match="the search ended because its step") as caught:
        await client.beam_search(PROMPT, params, deadline=1.0)
    assert caught.value.code == "expired"


async def test_mistakes_are_the_callers(client: Client) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    with pytest.raises(errors.PromptTooLongError, match="has 3000 tokens, but max_model_len of 'demo' is 2048"):
        await client.beam_search([5] * 3000, params)
    with pytest.raises(errors.ValidationError, match="must be a BeamSearchParams, got dict"):
        await client.beam_search(PROMPT, {"beam_width": 2})  # type: ignore[arg-type]  # the mistake
    with pytest.raises(errors.UnknownModelError):
        await client.beam_search(PROMPT, params, model="other")
    with pytest.raises(errors.ValidationError, match="concurrency_limit"):
        await client.beam_search(PROMPT, params, concurrency_limit=0)


def test_scripts_search_without_an_event_loop(deployment: LocalStack) -> None:
    with LLM(deployment.url, model="demo") as llm:
        (output,) = llm.beam_search(["spell 7:"], BeamSearchParams(beam_width=2, max_tokens=8))
    assert output.sequences[0].text == " seven."
