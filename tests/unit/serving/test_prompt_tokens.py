"""The part of a prompt that an engine gets, where the request limits its tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.shared import errors
from penstock.shared.broker import Claim
from penstock.shared.messages.core import Ready
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.pooling import PoolingParams
from penstock.shared.params.prompts import PromptEmbeds, Tokenization
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.serving.requests.intake import Intake
from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.tokenizer import TextCodec

MAX_MODEL_LEN = 10
READY = Ready(
    model_folder="/m",
    architecture="A",
    max_model_len=MAX_MODEL_LEN,
    num_blocks=9,
    block_size=16,
    dtype="float32",
    device="cpu",
    vocab_size=30,
    eos_token_ids=[2],
    supported_tasks=("generate", "embed"),
)
LONG = list(range(5, 25))


@pytest.fixture(scope="module")
def intake() -> Intake:
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(30)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Intake(TextCodec(tokenizer, ChatTemplate("{{ messages[0].content }}", {})), READY)


async def prepared(intake: Intake, **fields: Any) -> EngineCoreRequest:
    payload = msgspec.msgpack.encode(EngineCoreRequest(request_id="r", **fields))
    return await intake.prepare(Claim("r", payload, epoch=1, num_logged_tokens=0, attempt=1))


def text(token_ids: list[int]) -> str:
    return " ".join(f"w{token_id}" for token_id in token_ids)


@pytest.mark.parametrize(
    "prompt",
    [{"prompt_token_ids": LONG}, {"prompt": text(LONG)}, {"messages": [{"role": "user", "content": text(LONG)}]}],
    ids=lambda prompt: next(iter(prompt)),
)
@pytest.mark.parametrize(
    ("num_tokens", "side", "max_tokens", "expected"),
    [
        (4, None, 3, LONG[-4:]),
        (4, "right", 3, LONG[:4]),
        (-1, None, 3, LONG[-7:]),
        (-1, None, None, LONG[-9:]),
        (9, "left", 100, LONG[-9:]),
    ],
)
async def test_the_last_tokens_are_kept_in_any_form_of_prompt(
    intake: Intake, prompt: Any, num_tokens: int, side: str | None, max_tokens: int | None, expected: list[int]
) -> None:
    params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=num_tokens)
    request = await prepared(
        intake, sampling_params=params, tokenization=Tokenization(truncation_side=side) if side else None, **prompt
    )
    assert request.prompt_token_ids == expected
    assert request.sampling_params == SamplingParams(max_tokens=max_tokens), "the core is told nothing of it"
    own = Tokenization(truncate_prompt_tokens=num_tokens, truncation_side=side)
    same = await prepared(intake, sampling_params=SamplingParams(max_tokens=max_tokens), tokenization=own, **prompt)
    assert (same.prompt_token_ids, same.tokenization) == (expected, None)


async def test_a_prompt_that_is_pooled_may_fill_the_model(intake: Intake) -> None:
    for num_tokens, num_kept in ((-1, MAX_MODEL_LEN), (3, 3)):
        params = PoolingParams(truncate_prompt_tokens=num_tokens)
        request = await prepared(intake, pooling_params=params, prompt=text(LONG))
        assert request.prompt_token_ids == LONG[-num_kept:]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"truncate": 11, "prompt": "w1"}, errors.ValidationError, r"at most max_model_len \(10\), got 11"),
        ({"truncate": 10, "prompt": text(LONG)}, errors.PromptTooLongError, "one output token must fit"),
        ({"truncate": -1, "max_tokens": 10, "prompt": "w1"}, errors.ValidationError, "no token of the prompt is left"),
        ({"truncate": 3, "prompt": "w1", "resumable": True}, errors.UnsupportedParameterError, "comes in parts"),
        (
            {"truncate": 3, "prompt_embeds": PromptEmbeds("float32", (1, 1), b"1234")},
            errors.UnsupportedParameterError,
            "not of embeddings",
        ),
    ],
)
async def test_prompts_that_cannot_be_truncated_are_refused(
    intake: Intake, fields: Any, error: type[Exception], message: str
) -> None:
    params = SamplingParams(truncate_prompt_tokens=fields.pop("truncate"), max_tokens=fields.pop("max_tokens", 4))
    with pytest.raises(error, match=message):
        await prepared(intake, sampling_params=params, **fields)
