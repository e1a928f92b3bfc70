"""Input in chunks: a chunk with its own parameters, and the parameters that chunks may have."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass

import msgspec

from ...shared.deployment.records import ModelCard
from ...shared.errors import UnsupportedParameterError, ValidationError
from ...shared.messages.requests import EngineCoreRequest, InputChunk
from ...shared.params.kinds import RequestOutputKind
from ...shared.params.sampling import SamplingParams, derived_seed
from ...shared.values.shown import shown
from .prompt import Prompt, build_chunk, check_params


@dataclass(frozen=True)
class StreamingInput:
    """A chunk of streamed input, as in vLLM.

    ``sampling_params`` apply only to the answer to this chunk; None for those of the conversation.
    """

    prompt: Prompt
    sampling_params: SamplingParams | None = None


Chunk = Prompt | StreamingInput
GrowingPrompt = AsyncIterable[Prompt] | AsyncIterable[StreamingInput] | AsyncIterable[Chunk]


def check_streamed_params(params: SamplingParams | None) -> None:
    """Refuse parameters that a request with streamed input cannot have.

    Raises:
        UnsupportedParameterError: the message names the parameter.
    """
    if not isinstance(params, SamplingParams):
        return
    unsupported = {
        "n": params.n > 1,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "truncate_prompt_tokens": params.truncate_prompt_tokens is not None,
        "output_kind": params.output_kind == RequestOutputKind.FINAL_ONLY,
    }
    for name, is_refused in unsupported.items():
        if is_refused:
            raise UnsupportedParameterError(
                f"{name}={shown(getattr(params, name))} is not supported with streamed input; leave it at its default"
            )


def check_streamed(request: EngineCoreRequest) -> None:
    """Raise ``UnsupportedParameterError`` if a request with streamed input has an option that it cannot have."""
    if request.truncate_prompt_tokens is not None:
        raise UnsupportedParameterError(
            "truncate_prompt_tokens is not supported with streamed input, which keeps all chunks; leave it out"
        )


class ParamsOfChunks:
    """Selects the parameters of each chunk's answer, in a conversation that was begun with ``params``.

    The request carries the parameters of its first chunk, and they apply to each later chunk that has none. If the
    first chunk has its own parameters, each later chunk carries those of the conversation instead, so that a chunk has
    the same meaning at any position. Nothing here is random: a chunk that is sent again is equal to the byte.
    """

    def __init__(self, params: SamplingParams | None) -> None:
        self._params = params
        self._first_had_own = False

    def first(self, own: SamplingParams | None) -> SamplingParams | None:
        """Return the parameters of the request, whose first chunk has ``own``. Raises: as ``check_streamed_params``."""
        check_streamed_params(own)
        self._first_had_own = own is not None
        return self._params if own is None else own

    def later(self, chunk: object, own: SamplingParams | None, number: int, card: ModelCard) -> InputChunk:
        """Return the message for chunk ``number``, from 1.

        Raises:
            ValidationError, UnsupportedParameterError: ``own`` are invalid.
            and as ``build_chunk``.
        """
        message = build_chunk(chunk, card)
        if own is not None:
            if not isinstance(own, SamplingParams):
                raise ValidationError(f"sampling_params of a chunk must be a SamplingParams, got {type(own).__name__}")
            check_streamed_params(own)
            message.sampling_params = check_params(own, card)
        elif self._first_had_own:
            message.sampling_params = self._of_conversation(number)
        return message

    def _of_conversation(self, number: int) -> SamplingParams:
        params = SamplingParams() if self._params is None else self._params
        if params.seed is None:
            return params
        # The worker derives the seed in the same way if the request has these parameters. With one seed for all
        # answers, their noise would repeat.
        return msgspec.structs.replace(params, seed=derived_seed(params.seed, number))


def parts_of(chunk: Chunk, params: SamplingParams | None) -> tuple[Prompt, SamplingParams | None]:
    """Return the prompt of a chunk and its own parameters, from ``chunk`` or ``params``.

    Raises:
        ValidationError: both have parameters.
    """
    if not isinstance(chunk, StreamingInput):
        return chunk, params
    if params is not None and chunk.sampling_params is not None:
        raise ValidationError("the chunk has sampling_params already; pass them there, or to send, not both")
    return chunk.prompt, chunk.sampling_params if params is None else params
