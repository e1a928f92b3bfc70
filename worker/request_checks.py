"""Checks of requests against the properties of an engine, and of the length of prompts.

The worker process checks before it tokenizes. The core checks for callers that use it without a worker process.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..shared.errors import (
    PenstockError,
    PromptTooLongError,
    UnsupportedParameterError,
    UnsupportedTaskError,
    ValidationError,
)
from ..shared.messages.core import EngineCoreOutput
from ..shared.messages.outcome import FinishReason, RequestError
from ..shared.messages.requests import EngineCoreRequest
from ..shared.params.images import check_images
from ..shared.params.kinds import GENERATE
from ..shared.params.pooling import MAX_RESULT_BYTES, PoolingParams, PoolingSetup
from ..shared.params.sampling import SamplingParams
from .config.batch import FIRST_COME_FIRST_SERVED

# Parameters of a pooling request, for which nothing is sampled.
_NO_SAMPLING = SamplingParams(detokenize=False)


def check_served(request: EngineCoreRequest) -> SamplingParams:
    """Return the sampling parameters of ``request``; neutral ones for a pooling request.

    Raises:
        ValidationError: the request has no sampling parameters.
    """
    if request.pooling_params is not None:
        return _NO_SAMPLING
    if request.sampling_params is None:
        raise ValidationError("sampling_params is missing")
    return request.sampling_params


def check_adapter(request: EngineCoreRequest, *, has_adapters: bool, engine: str = "penstock") -> None:
    """Refuse an adapter if the engine serves none.

    Raises:
        UnsupportedParameterError: ``request`` names one; the message has the remedy.
    """
    if request.lora_request is None or has_adapters:
        return
    if engine == "http":
        raise UnsupportedParameterError(
            "lora_request: engine 'http' serves no adapters under the queue; Penstock's own and vLLM do, started with "
            "--enable-lora"
        )
    raise UnsupportedParameterError(
        f"lora_request {request.lora_request.lora_name!r}: this engine serves no adapters; start it with --enable-lora"
    )


def check_priority(request: EngineCoreRequest, scheduling_policy: str, *, engine: str = "penstock") -> None:
    """Refuse a priority if the engine orders its requests by arrival.

    Args:
        scheduling_policy: policy of the engine; empty for an engine without such an option.

    Raises:
        UnsupportedParameterError: the priority would have no effect; the message has the remedy.
    """
    if not request.priority or scheduling_policy not in ("", FIRST_COME_FIRST_SERVED):
        return
    if not scheduling_policy:
        raise UnsupportedParameterError(
            f"priority: engine {engine!r} orders requests by arrival; leave it at 0, or choose a band"
        )
    raise UnsupportedParameterError(
        f"priority: this engine orders requests by arrival (--scheduling-policy {scheduling_policy}); leave it at 0, "
        "choose a band, or have the engine started with --scheduling-policy priority"
    )


def check_images_served(request: EngineCoreRequest, max_images: int, reason: str) -> None:
    """Refuse images that the engine does not support.

    Args:
        max_images: largest number of images of a request.
        reason: why no images are supported, if ``max_images`` is 0.

    Raises:
        UnsupportedParameterError: the engine supports no images, or not in such a request.
        ValidationError: the request has too many images.
    """
    if not request.images:
        return
    if not max_images:
        why = reason or "this engine reads no images"
        raise UnsupportedParameterError(f"images: {why}; send text alone, or request another model")
    if request.resumable:
        raise UnsupportedParameterError("images: a resumable request's input must be text or token ids")
    check_images(request.images)
    if len(request.images) > max_images:
        raise ValidationError(
            f"images: this engine takes at most {max_images} in a request, got {len(request.images)}; send fewer, or "
            "start it with more --max-images"
        )


def check_task(request: EngineCoreRequest, supported_tasks: Sequence[str]) -> None:
    """Refuse a task that the model does not support.

    Raises:
        UnsupportedTaskError: the task of the request, to generate or a kind of pooling, is not supported.
    """
    params = request.pooling_params
    task = GENERATE if params is None else params.task or next((t for t in supported_tasks if t != GENERATE), "embed")
    if task not in supported_tasks:
        raise UnsupportedTaskError(f"the model does not {task}; its tasks: {', '.join(supported_tasks)}")


def check_prompt_length(
    num_prompt_tokens: int, max_model_len: int, *, is_pooled: bool = False, is_lower_bound: bool = False
) -> None:
    """Refuse a prompt that leaves no space for an output token, which a pooling request does not need.

    Args:
        is_lower_bound: whether ``num_prompt_tokens`` is a lower bound of the prompt's length.

    Raises:
        PromptTooLongError: the prompt does not fit.
    """
    if num_prompt_tokens < max_model_len or (is_pooled and num_prompt_tokens == max_model_len):
        return
    number = f"at least {num_prompt_tokens}" if is_lower_bound else f"{num_prompt_tokens}"
    message = f"prompt has {number} tokens, but max_model_len is {max_model_len}"
    raise PromptTooLongError(message if is_pooled else f"{message}, and at least one output token must fit")


def check_result_size(num_tokens: int, params: PoolingParams, setup: PoolingSetup) -> None:
    """Refuse a prompt whose result, with a row for each of its tokens, would not fit into a record.

    Raises:
        ValidationError: the result would be too large.
    """
    num_bytes = 4 * num_tokens * (params.dimensions or setup.dimensions or len(setup.labels))
    if num_bytes > MAX_RESULT_BYTES:
        raise ValidationError(
            f"the result of {num_tokens} tokens would have {num_bytes} bytes, and the limit is {MAX_RESULT_BYTES}; "
            "send a shorter text or request fewer dimensions"
        )


def refusal(request_id: str, error: PenstockError) -> EngineCoreOutput:
    """Return the output for a request that the engine refuses."""
    return EngineCoreOutput(
        request_id, finish_reason=FinishReason.ERROR, error=RequestError(error.code, str(error), error.retryable)
    )
