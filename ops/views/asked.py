"""What a request asks for, as far as the reader may see it."""

from __future__ import annotations

from typing import Any

import msgspec

from ...shared.errors import PenstockError
from ...shared.messages.requests import EngineCoreRequest
from .access import Access

_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)


class Asked(msgspec.Struct, frozen=True):
    """Parameters that are not at their defaults, and the prompt; "" where it may not be seen."""

    tenant: str
    band: str
    form: str
    parameters: dict[str, str]
    prompt: str


# Parameters that hold what somebody wrote.
_CONTENTS = ("stop", "bad_words", "structured_outputs", "extra_args")


def decode_asked(payload: bytes, access: Access) -> Asked | None:
    """Return what an encoded request asks for; None if it is none."""
    try:
        request = _decoder.decode(payload)
    except (msgspec.MsgspecError, PenstockError, UnicodeDecodeError):
        return None
    parameters = _parameters(request)
    if not access.sees_contents:
        parameters = {name: "hidden" if name in _CONTENTS else value for name, value in parameters.items()}
    prompt = _prompt(request) if access.sees_contents else ""
    return Asked(request.tenant, request.band, _form(request), parameters, prompt)


def _parameters(request: EngineCoreRequest) -> dict[str, str]:
    params: Any = request.sampling_params or request.pooling_params
    if params is None:
        return {}
    plain = type(params)()
    names = [name for name in params.__struct_fields__ if getattr(params, name) != getattr(plain, name)]
    return {name: repr(getattr(params, name)) for name in names}


def _form(request: EngineCoreRequest) -> str:
    if request.prompt_embeds is not None:
        return f"{request.num_prompt_tokens} embeddings"
    if request.prompt_token_ids is not None:
        return f"{len(request.prompt_token_ids)} token ids"
    if request.messages is not None:
        return f"{len(request.messages)} messages"
    return f"{len(request.prompt or '')} characters"


def _prompt(request: EngineCoreRequest) -> str:
    if request.messages is not None:
        return msgspec.json.format(msgspec.json.encode(request.messages)).decode()
    if request.prompt is not None:
        return request.prompt
    return " ".join(map(str, request.prompt_token_ids or ()))
