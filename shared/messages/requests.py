"""Messages of a client to a worker process, through Redis: requests and their further input."""

from __future__ import annotations

from typing import Any

import msgspec

from ..params.images import ImageInput
from ..params.lora import LoRARequest
from ..params.pooling import PoolingParams
from ..params.prompts import PromptEmbeds, Tokenization
from ..params.sampling import SamplingParams
from . import WIRE_VERSION

# How a generation resumes: a request may require it, and `Ready` reports it for an engine.
EXACT, GREEDY = "exact", "greedy"


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="add", gc=False):
    """A generation to run, or with ``pooling_params`` a prompt to pool. The client fills the prompt in one of four
    forms; the worker turns text into token ids.

    ``epoch``, ``attempt`` and ``output_token_ids`` are the broker's: set at claim, never by a client.
    ``session_id`` is the caller's name of the conversation; its engine does not use it.
    ``resume`` is "exact" for a request that only engines may claim which continue with exactly its tokens.
    The prompt of a ``resumable`` request is its first chunk; more follow as ``InputChunk`` until its input is closed.
    ``text_pair`` is the second text of a pair that is judged together. The second text begins at token
    ``second_text_at``, which some models need.
    ``tokenization`` is for the worker process, whose engine gets tokens.
    ``prediction`` is a likely output, according to its caller, and ``draft_token_ids`` are its tokens; it changes when
    tokens come, but never which ones.
    ``images`` are those of the prompt, in order. A message to an engine core has their bytes.
    """

    version: int = WIRE_VERSION
    request_id: str
    prompt_token_ids: list[int] | None = None
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    arrival_time: float = 0.0
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    external_req_id: str | None = None
    session_id: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str = ""
    tenant: str = "default"
    deadline: float | None = None
    epoch: int = 0
    attempt: int = 0
    output_token_ids: list[int] | None = None
    band: str = ""
    resumable: bool = False
    prompt_embeds: PromptEmbeds | None = None
    resume: str = ""
    text_pair: str | None = None
    second_text_at: int | None = None
    prediction: str | None = None
    draft_token_ids: list[int] | None = None
    tokenization: Tokenization | None = None
    images: list[ImageInput] | None = None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """The limit of its tokenization or its parameters; None keeps the whole prompt."""
        limit = None if self.tokenization is None else self.tokenization.truncate_prompt_tokens
        params = self.pooling_params or self.sampling_params
        return limit if limit is not None or params is None else params.truncate_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Length of a prompt of token ids or embeddings; 0 while it is text."""
        return len(self.prompt_token_ids or ()) if self.prompt_embeds is None else self.prompt_embeds.shape[0]


class InputChunk(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, gc=False):
    """Further input of a resumable request, after it has answered the former: either text or token ids.

    ``sampling_params`` are for the answer to it; None for those of the request. Without a seed, randomness follows from
    the request's seed.
    """

    version: int = WIRE_VERSION
    prompt_token_ids: list[int] | None = None
    prompt: str | None = None
    sampling_params: SamplingParams | None = None
