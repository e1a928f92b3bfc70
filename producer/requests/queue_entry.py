"""Queue entry of a request: its payload, its expected tokens, its deadline and its digests."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import time
from typing import Any

import msgspec

from ...shared.broker import Entry
from ...shared.errors import ValidationError
from ...shared.messages.requests import EngineCoreRequest, InputChunk
from ...shared.params.images import ImageInput
from ...shared.params.prompts import MODEL_LENGTH
from ..inputs.options import RequestOptions, key_name_of
from ..inputs.prompt import encode_request
from ..webhooks.events import WebhookTarget
from ..webhooks.targets import encode_target
from .digests import conversation_digests

# Estimated bytes of UTF-8 text per token; replaced by the engine's count when the request ends.
BYTES_PER_TOKEN = 4
# Estimated tokens of an image; models use 64 to some thousands.
TOKENS_PER_IMAGE = 256
# The id of a call is process and number, because random bytes for each would cost more than the rest of the call.
_PROCESS = secrets.token_hex(8)
_num_calls = itertools.count()


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A request with the options of its caller.

    Args:
        max_model_len: of the model; 0 while no worker has published it.
        target: receives the event of the end, after all ``num_answers`` requests of the request ``answer_of`` ended.
        content: digests by which a request with a caller's id is compared (``digests.py``).
    """

    request: EngineCoreRequest
    options: RequestOptions
    max_model_len: int
    target: WebhookTarget | None = None
    answer_of: str = ""
    num_answers: int = 1
    content: str = ""

    @property
    def due_in_s(self) -> float | None:
        """Seconds until its deadline, by this machine's clock; None without one."""
        return None if self.request.deadline is None else self.request.deadline - time.time()

    def entry(self, *, result_ttl_ms: int, fail_fast: bool, max_payload_bytes: int, **lease: Any) -> Entry:
        """Return the entry that the broker enqueues.

        Raises: as ``encode_request``.
            ValidationError: a webhook is set on an interactive request, which ends when its reader leaves.
        """
        if self.target is not None and lease:
            raise ValidationError("webhook_url needs a detached request: use submit, then stream from its handle")
        # First, because it names a field that cannot be encoded.
        payload = encode_request(_without_bytes(self.request), max_payload_bytes)
        is_one_of_several = self.num_answers > 1
        has_joint_webhook = self.target is not None and is_one_of_several
        request, own_fail_fast = self.request, self.options.get("fail_fast")
        num_prompt_tokens = _num_prompt_tokens(request)
        room = max(0, self.max_model_len - num_prompt_tokens) if self.max_model_len else 0
        params = request.sampling_params
        max_tokens = 0 if request.pooling_params else None if params is None else params.max_tokens
        digests = conversation_digests(request)
        deadline, timeout_s = self.options.get("deadline"), self.options.get("timeout_s")
        return Entry(
            request_id=request.request_id,
            payload=payload,
            result_ttl_ms=result_ttl_ms,
            fail_fast=fail_fast if own_fail_fast is None else own_fail_fast,
            call=f"{_PROCESS}-{os.getpid()}-{next(_num_calls)}{self.content and ' '}{self.content}",
            tenant=request.tenant,
            band=request.band,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=room if max_tokens is None else min(max_tokens, room) if self.max_model_len else max_tokens,
            deadline_ms=None if deadline is None else math.ceil(deadline * 1000),
            timeout_ms=None if timeout_s is None else math.ceil(timeout_s * 1000),
            is_resumable=request.resumable,
            webhook=None if self.target is None else encode_target(self.target),
            webhook_of=self.answer_of if has_joint_webhook else None,
            webhook_n=self.num_answers if has_joint_webhook else None,
            digests=digests.wanted,
            own_digests=digests.own,
            session_id=request.session_id or "",
            adapter="" if request.lora_request is None else request.lora_request.digest,
            is_fresh=self.options.get("request_id") is None,
            images=tuple(request.images or ()),
            key_name=key_name_of(self.options),
            adapter_name="" if request.lora_request is None else request.lora_request.lora_name,
            is_sibling=is_one_of_several and request.request_id != self.answer_of,
            **lease,
        )


def _without_bytes(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request as it is stored in its lane. The bytes of images are stored separately."""
    if not request.images:
        return request
    return msgspec.structs.replace(request, images=[ImageInput(image.digest) for image in request.images])


def _num_prompt_tokens(request: EngineCoreRequest) -> int:
    return _num_word_tokens(request) + TOKENS_PER_IMAGE * len(request.images or ())


def _num_word_tokens(request: EngineCoreRequest) -> int:
    limit, num_tokens = request.truncate_prompt_tokens, _num_whole_prompt_tokens(request)
    return num_tokens if limit is None or limit == MODEL_LENGTH else min(num_tokens, limit)


def _num_whole_prompt_tokens(request: EngineCoreRequest) -> int:
    if request.prompt_token_ids is not None or request.prompt_embeds is not None:
        return request.num_prompt_tokens
    if request.messages is not None:
        return len(msgspec.json.encode(request.messages)) // BYTES_PER_TOKEN + 1
    return _num_text_tokens(request.prompt) + (_num_text_tokens(request.text_pair) if request.text_pair else 0)


def num_chunk_tokens(chunk: InputChunk) -> int:
    """Return the number of tokens of a chunk of input; an estimate if it is text."""
    return _num_text_tokens(chunk.prompt) if chunk.prompt_token_ids is None else len(chunk.prompt_token_ids)


def _num_text_tokens(text: str | None) -> int:
    return len((text or "").encode()) // BYTES_PER_TOKEN + 1
