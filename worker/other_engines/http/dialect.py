"""What a server's way of speaking is to the core that drives it."""

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
    """What a server says of itself.

    Args:
        num_slots: requests that it computes at once.
        max_model_len: prompt and output tokens that one of them may have.
        kv_cache_size_tokens: what all of them may have.
        block_size: tokens that it gives out at once of these.
        vocab_size: None if it does not say.
        architecture: as ``config.json`` calls it; empty if it does not say.
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
class Asked:
    """What is wanted of a server: one call, which may be one of several for a request.

    Args:
        max_new_tokens: most tokens of this call.
        num_output_tokens: how many the request has had before; they are at the end of ``prompt_token_ids``.
        is_streamed: whether tokens are to come one by one.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    num_output_tokens: int
    is_streamed: bool


@dataclass
class Chunk:
    """What one piece of an answer says.

    Args:
        num_generated: tokens of this call so far, by the server's count.
        ending: why the call has ended; None while it has not.
        stop_reason: the token that ended it, if the server says so.
        refusal: why the request itself is wrong, in the server's words.
        failure: why the server could not go on.
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
    """One of the servers that are known."""

    @property
    def name(self) -> str: ...

    @property
    def generate_path(self) -> str:
        """Where a completion is asked for."""
        ...

    @property
    def health_path(self) -> str: ...

    def check(self, message: EngineCoreRequest, params: SamplingParams) -> None:
        """Refuse what the server cannot do.

        Raises:
            UnsupportedParameterError: names the field and the remedy.
        """
        ...

    def body(self, asked: Asked) -> dict[str, Any]:
        """What is posted, as JSON."""
        ...

    def read(self, answer: dict[str, Any], asked: Asked, num_seen: int) -> Chunk:
        """What ``answer`` says beyond the ``num_seen`` tokens of this call that are known.

        Raises:
            KeyError, TypeError, ValueError, IndexError: it is not as this dialect has it.
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
        raise UnsupportedParameterError("prompt_embeds: engine 'http' takes prompts of text and tokens only")
    if message.pooling_params is not None:
        raise UnsupportedParameterError("pooling_params: engine 'http' generates only")
    refuse_unserved(server, params, served)
    check_resume("http", message, params)


def refuse_grammar_fields(server: str, params: SamplingParams, names: tuple[str, ...]) -> None:
    """Raises ``UnsupportedParameterError`` if ``structured_outputs`` has one of ``names``."""
    for name in names if params.structured_outputs is not None else ():
        if getattr(params.structured_outputs, name):
            raise UnsupportedParameterError(f"structured_outputs.{name} is not supported by {server}; leave it out")
