"""What a client writes into Redis for a worker process: requests, and the input that they go on with."""

from __future__ import annotations

from typing import Any

import msgspec

from ..params.images import ImageInput
from ..params.lora import LoRARequest
from ..params.pooling import PoolingParams
from ..params.prompt_embeds import PromptEmbeds
from ..params.sampling import SamplingParams
from ..params.tokenization import Tokenization
from . import WIRE_VERSION

# What a resumed generation goes on with: what a request may demand, and what `Ready` tells of an engine.
EXACT, GREEDY = "exact", "greedy"


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="add", gc=False):
    """A generation to run, or with ``pooling_params`` a prompt to pool. The client fills the prompt in one of four
    forms; the worker turns text into token ids.

    ``epoch``, ``attempt`` and ``output_token_ids`` are the broker's: set at claim, never by a client.
    ``session_id`` is the caller's name for what the request goes on with; its engine has no use for it.
    ``resume`` is "exact" for a request that no engine shall take which could not go on with its very tokens.
    The prompt of a ``resumable`` request is its first chunk; more follow as ``InputChunk`` until its input is closed.
    ``text_pair`` is the second text of a pair, to be judged together; from its token ``second_text_at`` on the tokens
    are those of the second text, which some models tell apart.
    ``tokenization`` is for the worker process, whose engine gets tokens.
    ``prediction`` is text that its caller takes for a likely output, and ``draft_token_ids`` are the tokens of it; it
    changes how soon tokens come, and never which.
    ``images`` are those of the prompt, in the order of their places in it. A message to an engine core has their bytes.
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
        """What its tokenization or its parameters say; None keeps the whole prompt."""
        said = None if self.tokenization is None else self.tokenization.truncate_prompt_tokens
        params = self.pooling_params or self.sampling_params
        return said if said is not None or params is None else params.truncate_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Of a prompt that is token ids or embeddings; 0 while it is text."""
        return len(self.prompt_token_ids or ()) if self.prompt_embeds is None else self.prompt_embeds.shape[0]


class InputChunk(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, gc=False):
    """What a resumable request goes on with once it has answered what came before: text or token ids, one of both.

    ``sampling_params`` are those of the answer to it, and None those of the request. Without a seed of their own,
    randomness follows from the request's.
    """

    version: int = WIRE_VERSION
    prompt_token_ids: list[int] | None = None
    prompt: str | None = None
    sampling_params: SamplingParams | None = None
