"""The input and parameters of a request, as far as the operator may see them."""

from __future__ import annotations

from typing import Any

import msgspec

from ...shared.errors import PenstockError
from ...shared.messages.requests import EngineCoreRequest
from .access import Access

_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)


class RequestInput(msgspec.Struct, frozen=True):
    """Parameters that are not at their defaults, and the prompt; "" if the operator may not see it."""

    tenant: str
    band: str
    form: str
    parameters: dict[str, str]
    prompt: str


# Parameters that hold text of users.
_CONTENTS = ("stop", "bad_words", "structured_outputs", "extra_args")


def decode_request_input(payload: bytes, access: Access) -> RequestInput | None:
    """Return the input of an encoded request; None if ``payload`` is not a request."""
    try:
        request = _decoder.decode(payload)
    except (msgspec.MsgspecError, PenstockError, UnicodeDecodeError):
        return None
    parameters = _parameters(request)
    if not access.sees_contents:
        parameters = {name: "hidden" if name in _CONTENTS else value for name, value in parameters.items()}
    prompt = _prompt(request) if access.sees_contents else ""
    return RequestInput(request.tenant, request.band, _form(request), parameters, prompt)


def _parameters(request: EngineCoreRequest) -> dict[str, str]:
    params: Any = request.sampling_params or request.pooling_params
    if params is None:
        return {}
    defaults = type(params)()
    names = [name for name in params.__struct_fields__ if getattr(params, name) != getattr(defaults, name)]
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
