"""The interface of a server's protocol to the core that uses it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from ....shared.errors import UnsupportedParameterError
from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams
from ...core.resuming import check_resume
from ..checked_request import refuse_unserved


@dataclass(frozen=True)
class ServerFacts:
    """Properties that a server reports.

    Args:
        num_slots: number of requests that it computes at the same time.
        max_model_len: largest number of prompt and output tokens of a request.
        kv_cache_size_tokens: largest number of tokens of all requests together.
        block_size: tokens per block of its cache.
        vocab_size: size of the vocabulary; None if unknown.
        architecture: architecture as in ``config.json``; empty if unknown.
    """

    version: str
    num_slots: int
    max_model_len: int
    kv_cache_size_tokens: int
    block_size: int
    vocab_size: int | None
    model: str
    architecture: str = ""


@dataclass(frozen=True)
class ServerCall:
    """A call of a server; a request may need several.

    Args:
        max_new_tokens: largest number of tokens of this call.
        num_output_tokens: number of earlier output tokens of the request, which end ``prompt_token_ids``.
        is_streamed: whether tokens are streamed.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    num_output_tokens: int
    is_streamed: bool


@dataclass
class Chunk:
    """Contents of one event of a response.

    Args:
        num_generated: tokens of this call so far, by the server's count.
        ending: why the call has ended; None before its end.
        stop_reason: token that ended the call, if the server reports it.
        refusal: the server's message if the request is invalid.
        failure: the server's message if it failed.
        num_cached_tokens: prompt tokens that were in its cache.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_generated: int = 0
    ending: FinishReason | None = None
    stop_reason: int | None = None
    refusal: str = ""
    failure: str = ""
    num_cached_tokens: int = 0


class Dialect(Protocol):
    """Protocol of one of the known servers."""

    @property
    def name(self) -> str: ...

    @property
    def generate_path(self) -> str:
        """Path of the endpoint for completions."""
        ...

    @property
    def health_path(self) -> str: ...

    def check(self, message: EngineCoreRequest, params: SamplingParams) -> None:
        """Refuse a request that the server cannot serve.

        Raises:
            UnsupportedParameterError: names the field and the remedy.
        """
        ...

    def body(self, call: ServerCall) -> dict[str, Any]:
        """Return the JSON object to post for ``call``."""
        ...

    def decode(self, answer: dict[str, Any], call: ServerCall, num_received: int) -> Chunk:
        """Return the contents of ``answer`` after the first ``num_received`` tokens of this call.

        Raises:
            KeyError, TypeError, ValueError, IndexError: ``answer`` does not have the form of this dialect.
        """
        ...


def check_request(server: str, message: EngineCoreRequest, params: SamplingParams, served: Collection[str]) -> None:
    """Refuse prompts, sampling parameters and resumes that ``server`` cannot serve.

    Args:
        served: names of the sampling parameters that the dialect passes on.

    Raises:
        UnsupportedParameterError: names the field and the remedy.
    """
    if message.prompt_embeds is not None:
        raise UnsupportedParameterError("prompt_embeds: engine 'http' supports only prompts of text and tokens")
    if message.pooling_params is not None:
        raise UnsupportedParameterError("pooling_params: engine 'http' supports only generation")
    refuse_unserved(server, params, served)
    check_resume("http", message, params)


def refuse_grammar_fields(server: str, params: SamplingParams, names: tuple[str, ...]) -> None:
    """Raise ``UnsupportedParameterError`` if ``structured_outputs`` has one of ``names``."""
    for name in names if params.structured_outputs is not None else ():
        if getattr(params.structured_outputs, name):
            raise UnsupportedParameterError(f"structured_outputs.{name} is not supported by {server}; leave it out")
