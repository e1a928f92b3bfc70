"""What no engine of this version runs, and how long a prompt may be.

The worker process checks before it tokenizes; the core does for whoever hands it a request without a worker process.
"""

from __future__ import annotations

from ..shared.errors import PromptTooLongError, UnsupportedParameterError, ValidationError
from ..shared.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestError
from ..shared.params import SamplingParams


def check_served(request: EngineCoreRequest) -> SamplingParams:
    """Return how ``request`` is to be sampled.

    Raises:
        UnsupportedParameterError: it asks for what is on the wire, but served by no engine yet.
        ValidationError: it has no sampling parameters.
    """
    if request.pooling_params is not None:
        raise UnsupportedParameterError("pooling_params: this version serves generation only")
    if request.lora_request is not None:
        raise UnsupportedParameterError("lora_request: this version serves no adapters")
    if request.sampling_params is None:
        raise ValidationError("sampling_params is missing")
    return request.sampling_params


def check_prompt_length(num_prompt_tokens: int, max_model_len: int) -> None:
    """Raises ``PromptTooLongError`` if the prompt leaves no room for an output token."""
    if num_prompt_tokens >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {max_model_len}, and at least one "
            "output token must fit"
        )


def refusal(request_id: str, error: ValidationError) -> EngineCoreOutput:
    """The answer to a request that the engine will not run."""
    return EngineCoreOutput(
        request_id, finish_reason=FinishReason.ERROR, error=RequestError(error.code, str(error), error.retryable)
    )
