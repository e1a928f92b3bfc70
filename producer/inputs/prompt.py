"""Build an encoded request from a caller's arguments, and report every mistake here rather than by a worker."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from ...shared.deployment.records import ModelCard
from ...shared.errors import (
    PayloadTooLargeError,
    PromptTooLongError,
    UnsupportedParameterError,
    UnsupportedTaskError,
    ValidationError,
)
from ...shared.messages.requests import EngineCoreRequest, InputChunk
from ...shared.params.chat import check_messages
from ...shared.params.checks import check_known
from ...shared.params.kinds import GENERATE, POOLING_TASKS
from ...shared.params.pooling import PoolingParams
from ...shared.params.prompts import EMBEDS_ITEM_BYTES, PromptEmbeds
from ...shared.params.sampling import SamplingParams
from ...shared.values.checks import UNENCODABLE, check_text, unencodable
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from ..results import TextPair
from .images import check_number, is_prompt_with_data, split_prompt
from .options import (
    RequestOptions,
    cache_salt_of,
    check_flag,
    check_linger,
    check_request_id,
    expiry_time_of,
    external_req_id_of,
    lora_request_of,
    prediction_of,
    read_ttl_of,
    resume_of,
    session_id_of,
    template_kwargs_of,
    trace_headers_of,
)
from .tokenization import check_tokenization, tokenization_of

P = TypeVar("P")
MAX_PAYLOAD_BYTES = 4 * 1024 * 1024
_encoder = msgspec.msgpack.Encoder()


@runtime_checkable
class EmbedsArray(Protocol):
    """A numpy array or a torch tensor, ``[prompt tokens, hidden size]``, of float32, float16 or bfloat16."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | EmbedsArray | Mapping[str, Any]
"""Text, token ids, chat messages (``{"role": ..., "content": ...}``; the worker applies the chat template), or
embeddings (a numpy array or torch tensor; the worker must allow them). Or a dictionary with one of these and images:
``{"prompt": "<image> what is this", "multi_modal_data": {"image": ...}}``; chat messages may have them as parts."""


def build_request(
    prompt: Prompt,
    params: SamplingParams | None,
    *,
    card: ModelCard,
    tenant: str = "default",
    options: RequestOptions | None = None,
) -> EngineCoreRequest:
    """Return the request for ``prompt``. Its seed is fixed, so that a resumed generation continues with the same noise.

    Raises:
        ValidationError: a field has the wrong type or range.
        PromptTooLongError: the token ids leave no room for output within the model's ``max_model_len``.
        UnsupportedParameterError: a parameter that this version does not support.
        UnsupportedTaskError: the model does not generate.
    """
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        hint = "; for pooling, use encode" if isinstance(params, PoolingParams) else ""
        raise ValidationError(f"params must be a SamplingParams, got {type(params).__name__}{hint}")
    if GENERATE not in card.supported_tasks:
        raise _unsupported_task(card, GENERATE)
    params = check_params(params, card)
    if params.seed is None:
        # Not by msgspec.structs.replace, which would repeat all checks: half the cost of a request.
        params = copy.copy(params)
        msgspec.structs.force_setattr(params, "seed", int.from_bytes(os.urandom(8)) >> 1)
    options = options or {}
    request = _envelope(options, card, tenant)
    request.sampling_params = params
    request.prediction = prediction_of(options)
    _set_prompt(request, prompt, card, options.get("chat_template_kwargs"))
    return request


def check_params(params: SamplingParams, card: ModelCard) -> SamplingParams:
    """Return ``params`` if callers may set them and workers of the model support them, as far as its card says.

    Raises:
        ValidationError: a field may be set only by the worker.
        UnsupportedParameterError: a parameter that this version, or the model's workers, do not support.
    """
    params.check_from_caller()
    # An engine generates one answer per request: see fan_out.
    params.check_supported(n=params.n)
    if params.extra_args is not None and card.registered_at:
        check_known(params.extra_args, card.logits_processors)
    return params


def build_pooling_request(
    prompt: Prompt | TextPair,
    params: PoolingParams | None,
    *,
    card: ModelCard,
    tenant: str = "default",
    options: RequestOptions | None = None,
) -> EngineCoreRequest:
    """Return the request to pool ``prompt``.

    Raises:
        ValidationError: a field has the wrong type or range.
        PromptTooLongError: more token ids than the model's ``max_model_len``.
        UnsupportedTaskError: the model does not support ``params.task``; lists its tasks.
    """
    params = PoolingParams() if params is None else params
    if not isinstance(params, PoolingParams):
        raise ValidationError(f"params must be a PoolingParams, got {type(params).__name__}")
    task = params.task or next((name for name in card.supported_tasks if name != GENERATE), POOLING_TASKS[0])
    # Without a worker's card, the worker itself refuses the task.
    if task not in card.supported_tasks and card.registered_at:
        raise _unsupported_task(card, task)
    options = options or {}
    request = _envelope(options, card, tenant)
    request.pooling_params = params
    if isinstance(prompt, TextPair):
        request.prompt, request.text_pair = prompt.text, prompt.text_pair
        check_tokenization(request, card)
    else:
        _set_prompt(request, prompt, card, options.get("chat_template_kwargs"))
    if request.prompt_embeds is not None:
        raise UnsupportedParameterError("prompts that are pooled are text or token ids, not embeddings")
    return request


def _unsupported_task(card: ModelCard, task: str) -> UnsupportedTaskError:
    return UnsupportedTaskError(
        f"model {shown(card.model)} does not {task}; its tasks: {', '.join(card.supported_tasks)}"
    )


def _envelope(options: RequestOptions, card: ModelCard, tenant: str) -> EngineCoreRequest:
    """Return a request without prompt and parameters."""
    check_linger(options.get("linger_s"))
    read_ttl_of(options.get("read_ttl_s"), request_id=options.get("request_id"))
    if (fail_fast := options.get("fail_fast")) is not None:
        check_flag("fail_fast", fail_fast)
    request_id, priority = options.get("request_id"), options.get("priority", 0)
    band, option_tenant = options.get("band"), options.get("tenant")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise ValidationError(f"priority must be a 32-bit integer, got {shown(priority)}")
    return EngineCoreRequest(
        request_id=os.urandom(16).hex() if request_id is None else check_request_id(request_id),
        arrival_time=time.time(),
        model=card.model,
        tenant=check_name("tenant", tenant if option_tenant is None else option_tenant),
        priority=priority,
        cache_salt=cache_salt_of(options),
        lora_request=lora_request_of(options),
        trace_headers=trace_headers_of(options),
        external_req_id=external_req_id_of(options),
        session_id=session_id_of(options),
        resume=resume_of(options),
        deadline=expiry_time_of(options) if options else None,
        tokenization=tokenization_of(options),
        band="" if band is None else check_name("band", band),
    )


def build_chunk(chunk: object, card: ModelCard) -> InputChunk:
    """Return the message for a later chunk of streamed input.

    Raises:
        ValidationError: it is neither text nor a list of token ids, or is empty.
        PromptTooLongError: the token ids alone leave no room within the model's ``max_model_len``.
    """
    if isinstance(chunk, str) and chunk:
        return InputChunk(prompt=check_text("a chunk of input", chunk))
    if isinstance(chunk, Sequence) and not isinstance(chunk, str | bytes | bytearray) and chunk:
        token_ids = _token_ids(chunk, card)
        _check_fits(len(token_ids), card)
        return InputChunk(prompt_token_ids=token_ids)
    raise ValidationError(f"a chunk of input must be text or token ids, and not empty, got {shown(chunk)}")


def as_prompts(prompts: Any) -> list[Any]:
    """Return one prompt of any form, or several, as a list.

    Raises:
        ValidationError: it is neither.
    """
    if isinstance(prompts, str | TextPair | EmbedsArray | Mapping):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and is_prompt_with_data(prompts[0]):
        return list(prompts)
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int | dict):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValidationError(f"prompts must be a prompt or a list of prompts, got {shown(prompts)}")
    return list(prompts)


def params_of_each(params: P | Sequence[P], num_prompts: int) -> list[P]:
    """Return the parameters of each of several prompts, passed as one for all or one each.

    Raises:
        ValidationError: the numbers of parameters and prompts differ.
    """
    each: list[P] = list(params) if isinstance(params, Sequence) else [params] * num_prompts
    if len(each) != num_prompts:
        raise ValidationError(f"params must be one or as many as the prompts ({num_prompts}), got {len(each)}")
    return each


def encode_request(request: EngineCoreRequest, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> bytes:
    """Return the bytes for the stream.

    Raises:
        PayloadTooLargeError: more than ``max_payload_bytes``.
        ValidationError: a value cannot be encoded; names the field.
    """
    try:
        payload = _encoder.encode(request)
    except UNENCODABLE as error:
        raise unencodable("", request, error) from error
    if len(payload) > max_payload_bytes:
        raise PayloadTooLargeError(
            f"the encoded request has {len(payload)} bytes, max_payload_bytes is {max_payload_bytes}; "
            "shorten the prompt"
        )
    return payload


def _set_prompt(
    request: EngineCoreRequest, prompt: Prompt, card: ModelCard, chat_template_kwargs: Mapping[str, Any] | None
) -> None:
    prompt, images = split_prompt(prompt)
    if images:
        check_number(images, card)
        request.images = images
    if isinstance(prompt, str):
        if not prompt:
            raise ValidationError("prompt must not be empty, got ''")
        request.prompt = check_text("prompt", prompt)
    elif isinstance(prompt, AsyncIterable):
        raise ValidationError(
            "a prompt that grows chunk by chunk cannot be sent here; use stream, stream_outputs or converse"
        )
    elif not isinstance(prompt, Sequence) and isinstance(prompt, EmbedsArray):
        request.prompt_embeds = _embeds(prompt, request, card)
    elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise ValidationError(
            f"prompt must be text, token ids, chat messages or embeddings, got {type(prompt).__name__}"
        )
    elif not prompt:
        raise ValidationError("prompt must not be empty, got []")
    elif all(isinstance(item, Mapping) for item in prompt):
        request.messages = check_messages(prompt)  # type: ignore[arg-type]  # narrowed by all()
        request.chat_template_kwargs = template_kwargs_of(chat_template_kwargs)
    else:
        request.prompt_token_ids = _token_ids(prompt, card)
    max_tokens = check_tokenization(request, card)
    if request.prompt_token_ids is not None:
        num_tokens = len(request.prompt_token_ids)
        _check_fits(min(num_tokens, max_tokens or num_tokens), card)
    if chat_template_kwargs and request.messages is None:
        raise ValidationError("chat_template_kwargs needs a prompt of chat messages")


def _embeds(prompt: EmbedsArray, request: EngineCoreRequest, card: ModelCard) -> PromptEmbeds:
    embeds = encode_embeds(prompt)
    _check_fits(embeds.shape[0], card)
    if request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None:
        raise UnsupportedParameterError("prompt_logprobs needs a prompt of tokens, not of embeddings; leave it at None")
    return embeds


def _token_ids(prompt: Sequence[Any], card: ModelCard) -> list[int]:
    for position, token_id in enumerate(prompt):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValidationError(f"prompt[{position}] must be a token id, got {shown(token_id)}")
        if token_id < 0 or (card.vocab_size and token_id >= card.vocab_size):
            highest = f"in [0, {card.vocab_size})" if card.vocab_size else "non-negative"
            raise ValidationError(f"prompt[{position}] must be {highest}, got {token_id}")
    return list(prompt)


def _check_fits(num_prompt_tokens: int, card: ModelCard) -> None:
    """Check the prompt's length, and leave room for an output token if the model generates."""
    if not card.max_model_len:
        return
    if GENERATE not in card.supported_tasks and num_prompt_tokens > card.max_model_len:
        raise PromptTooLongError(
            f"prompt has {num_prompt_tokens} tokens, but max_model_len of {shown(card.model)} is {card.max_model_len}"
        )
    if GENERATE in card.supported_tasks and num_prompt_tokens >= card.max_model_len:
        raise PromptTooLongError(
            f"prompt has {num_prompt_tokens} tokens, but max_model_len of {shown(card.model)} is "
            f"{card.max_model_len}, and at least one output token must fit"
        )


def encode_embeds(array: EmbedsArray) -> PromptEmbeds:
    """Return ``array`` in the form of a message.

    Raises:
        ValidationError: it has another dtype or number of dimensions, or is empty.
    """
    # numpy names a dtype with another byte order ">f4", which is not in the list.
    dtype, shape = str(array.dtype).removeprefix("torch."), tuple(array.shape)
    if dtype not in EMBEDS_ITEM_BYTES:
        raise ValidationError(
            f"prompt embeddings must be of dtype {', '.join(EMBEDS_ITEM_BYTES)}, got {dtype}; convert them first"
        )
    if len(shape) != 2 or 0 in shape:
        raise ValidationError(
            f"prompt embeddings must have the shape [prompt tokens, hidden size], neither of them 0, got {list(shape)}"
        )
    return PromptEmbeds(dtype, shape, _item_bytes(array))


def _item_bytes(array: Any) -> bytes:
    """Return the items in row-major order."""
    if hasattr(array, "tobytes"):
        return array.tobytes()
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        raise ValidationError(f"prompt embeddings must be a numpy array or a torch tensor, got {type(array).__name__}")
    # Viewed as bytes, since numpy has no bfloat16.
    return array.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
