"""What no engine of this version runs, and how long a prompt may be.

The worker process checks before it tokenizes; the core does for whoever hands it a request without a worker process.
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
from ..shared.messages.from_core import EngineCoreOutput
from ..shared.messages.outcome import FinishReason, RequestError
from ..shared.messages.requests import EngineCoreRequest
from ..shared.params.images import check_images
from ..shared.params.kinds import GENERATE
from ..shared.params.sampling import SamplingParams
from .config.ordering import FIRST_COME_FIRST_SERVED

# Of a prompt that is pooled: nothing is sampled.
_NO_SAMPLING = SamplingParams(detokenize=False)


def check_served(request: EngineCoreRequest) -> SamplingParams:
    """Return how ``request`` is to be sampled; of one that is pooled nothing is.

    Raises:
        UnsupportedParameterError: it asks for what is on the wire, but served by no engine yet.
        ValidationError: it has no sampling parameters.
    """
    if request.pooling_params is not None:
        return _NO_SAMPLING
    if request.sampling_params is None:
        raise ValidationError("sampling_params is missing")
    return request.sampling_params


def check_adapter(request: EngineCoreRequest, *, has_adapters: bool, engine: str = "penstock") -> None:
    """Refuse an adapter where none are served.

    Raises:
        UnsupportedParameterError: ``request`` wants one; says what has to be done for it.
    """
    if request.lora_request is None or has_adapters:
        return
    if engine != "penstock":
        raise UnsupportedParameterError(
            f"lora_request: engine {engine!r} serves no adapters under the queue; Penstock's own does, started with "
            f"--enable-lora"
        )
    raise UnsupportedParameterError(
        f"lora_request {request.lora_request.lora_name!r}: this engine serves no adapters; have it started with "
        f"--enable-lora"
    )


def check_priority(request: EngineCoreRequest, scheduling_policy: str, *, engine: str = "penstock") -> None:
    """Refuse a priority where the engine orders its requests by arrival.

    Args:
        scheduling_policy: of the engine; empty of an engine that has no such option.

    Raises:
        UnsupportedParameterError: the priority would have no effect; says what to do.
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
    """Refuse images that the engine does not take.

    Args:
        max_images: of a request.
        reason: why there may be none.

    Raises:
        UnsupportedParameterError: it takes none, or not in such a request.
        ValidationError: it takes fewer.
    """
    if not request.images:
        return
    if not max_images:
        why = reason or "this engine reads no images"
        raise UnsupportedParameterError(f"images: {why}; send text alone, or ask for another model")
    if request.resumable:
        raise UnsupportedParameterError("images: a resumable request's input must be text or token ids")
    check_images(request.images)
    if len(request.images) > max_images:
        raise ValidationError(
            f"images: this engine takes at most {max_images} in a request, got {len(request.images)}; send fewer, or "
            "have it started with more --max-images"
        )


def check_task(request: EngineCoreRequest, supported_tasks: Sequence[str]) -> None:
    """Refuse what the model is not for.

    Raises:
        UnsupportedTaskError: it generates and is to pool, or the other way round, or pools to something else.
    """
    params = request.pooling_params
    task = GENERATE if params is None else params.task or next((t for t in supported_tasks if t != GENERATE), "embed")
    if task not in supported_tasks:
        raise UnsupportedTaskError(f"the model does not {task}; its tasks: {', '.join(supported_tasks)}")


def check_prompt_length(
    num_prompt_tokens: int, max_model_len: int, *, is_pooled: bool = False, is_lower_bound: bool = False
) -> None:
    """Refuse a prompt that leaves no room for an output token, which a pooled one does not need.

    Args:
        is_lower_bound: the prompt has at least ``num_prompt_tokens``.

    Raises:
        PromptTooLongError: the prompt does not fit.
    """
    if num_prompt_tokens < max_model_len or (is_pooled and num_prompt_tokens == max_model_len):
        return
    number = f"at least {num_prompt_tokens}" if is_lower_bound else f"{num_prompt_tokens}"
    message = f"prompt has {number} tokens, but max_model_len is {max_model_len}"
    raise PromptTooLongError(message if is_pooled else f"{message}, and at least one output token must fit")


def refusal(request_id: str, error: PenstockError) -> EngineCoreOutput:
    """The answer to a request that the engine will not run."""
    return EngineCoreOutput(
        request_id, finish_reason=FinishReason.ERROR, error=RequestError(error.code, str(error), error.retryable)
    )
