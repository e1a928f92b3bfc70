"""Input that comes in chunks: one of them with parameters of its own, and which parameters it may have."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass

import msgspec

from ...shared.deployment.records import ModelCard
from ...shared.errors import UnsupportedParameterError, ValidationError
from ...shared.messages.requests import EngineCoreRequest, InputChunk
from ...shared.params.kinds import RequestOutputKind
from ...shared.params.sampling import SamplingParams
from ...shared.params.seeds import derived_seed
from ...shared.values.shown import shown
from .prompt import Prompt, build_chunk, check_params


@dataclass(frozen=True)
class StreamingInput:
    """A chunk of streamed input as vLLM has it.

    ``sampling_params`` are those of the answer to this chunk alone; None: those of the conversation.
    """

    prompt: Prompt
    sampling_params: SamplingParams | None = None


Chunk = Prompt | StreamingInput
GrowingPrompt = AsyncIterable[Prompt] | AsyncIterable[StreamingInput] | AsyncIterable[Chunk]


def check_streamed_params(params: SamplingParams | None) -> None:
    """Refuse what a request with streamed input cannot have.

    Raises:
        UnsupportedParameterError: the message names the parameter.
    """
    if not isinstance(params, SamplingParams):
        return
    refused = {
        "n": params.n > 1,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "truncate_prompt_tokens": params.truncate_prompt_tokens is not None,
        "output_kind": params.output_kind == RequestOutputKind.FINAL_ONLY,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UnsupportedParameterError(
                f"{name}={shown(getattr(params, name))} is not supported with streamed input; leave it at its default"
            )


def check_streamed(request: EngineCoreRequest) -> None:
    """Raises ``UnsupportedParameterError`` if the options of a request with streamed input say what it cannot have."""
    if request.truncate_prompt_tokens is not None:
        raise UnsupportedParameterError(
            "truncate_prompt_tokens is not supported with streamed input: all chunks stay in mind; leave it out"
        )


class ParamsOfChunks:
    """Which parameters each chunk's answer has, in a conversation that was begun with ``params``.

    The request carries those of its first chunk, and they hold for each that has none. If the first one's were its own,
    those of the conversation are said with each later chunk instead, so that each chunk means the same wherever it
    comes. Nothing is drawn at random here: a chunk that is sent again is the same to the byte.
    """

    def __init__(self, params: SamplingParams | None) -> None:
        self._params = params
        self._first_had_own = False

    def first(self, own: SamplingParams | None) -> SamplingParams | None:
        """Return those of the request, whose first chunk has ``own``. Raises: as ``check_streamed_params``."""
        check_streamed_params(own)
        self._first_had_own = own is not None
        return self._params if own is None else own

    def later(self, chunk: object, own: SamplingParams | None, number: int, card: ModelCard) -> InputChunk:
        """Return the message for chunk ``number``, from 1.

        Raises:
            ValidationError, UnsupportedParameterError: ``own`` are wrong.
            and as ``build_chunk``.
        """
        built = build_chunk(chunk, card)
        if own is not None:
            if not isinstance(own, SamplingParams):
                raise ValidationError(f"sampling_params of a chunk must be a SamplingParams, got {type(own).__name__}")
            check_streamed_params(own)
            built.sampling_params = check_params(own, card)
        elif self._first_had_own:
            built.sampling_params = self._of_conversation(number)
        return built

    def _of_conversation(self, number: int) -> SamplingParams:
        params = SamplingParams() if self._params is None else self._params
        if params.seed is None:
            return params
        # As the worker derives it where the request has these parameters: one seed would repeat itself in each answer.
        return msgspec.structs.replace(params, seed=derived_seed(params.seed, number))


def parts_of(chunk: Chunk, params: SamplingParams | None) -> tuple[Prompt, SamplingParams | None]:
    """Return the prompt of a chunk and its own parameters, wherever they were said.

    Raises:
        ValidationError: they were said twice.
    """
    if not isinstance(chunk, StreamingInput):
        return chunk, params
    if params is not None and chunk.sampling_params is not None:
        raise ValidationError("the chunk has sampling_params already; pass them there, or to send, not both")
    return chunk.prompt, chunk.sampling_params if params is None else params
