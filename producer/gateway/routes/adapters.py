"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM: change the names of adapters over HTTP.

They are off by default, because a caller can make engines read folders.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....shared.errors import (
    AdapterFileError,
    EngineCallError,
    UnknownAdapterError,
    UnknownModelError,
    UnsupportedAdapterError,
    ValidationError,
)
from ....shared.lora.registry import EVERYBODY
from ....shared.values.shown import shown
from ...openai.errors import OpenAIError, bad_field
from ..http import Gateway, gateway_of, read_struct, while_connected
from ..idempotency import reserve
from ..operations import Operation


class LoadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request. ``lora_path`` is a folder visible to the gateway and the engines. ``load_inplace`` points an
    existing name to it.

    ``base_model_name`` is the model of the adapter; needed only if several models are served.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request. ``lora_int_id``, which vLLM has, is ignored."""

    lora_name: str
    lora_int_id: int | None = None


async def load(request: Request) -> Response:
    """Answer POST /v1/load_lora_adapter."""
    gateway, tenant = _permitted(request)
    body = await read_struct(request, LoadBody)
    is_repeated = await _is_repeated(request)
    adapters = await gateway.client.adapters()
    paths = [adapter.path for adapter in adapters if (adapter.name, adapter.tenant) == (body.lora_name, tenant)]
    is_loaded_by_this = is_repeated and paths == [body.lora_path]
    if paths and not body.load_inplace and not is_loaded_by_this:
        message = f"lora_name {shown(body.lora_name)} is already in use; pass load_inplace=true to replace its adapter"
        raise bad_field("lora_name", message, code="adapter_exists")
    client, model = gateway.client, body.base_model_name
    try:
        await while_connected(
            request, client.add_lora(body.lora_name, body.lora_path, tenant=tenant or None, model=model)
        )
    except (AdapterFileError, UnsupportedAdapterError) as error:
        raise bad_field("lora_path", f"lora_path: {error}", code=error.code) from error
    except UnknownModelError as error:
        raise OpenAIError(404, str(error), param="base_model_name", code="model_not_found") from error
    except ValidationError as error:
        if not str(error).startswith("model "):
            raise
        raise bad_field("base_model_name", f"base_model_name{str(error).removeprefix('model')}") from error
    except EngineCallError as error:
        if not paths:
            # An engine that cannot load it may fail to unload it too. If no engine could, the name is removed already.
            with suppress(EngineCallError, UnknownAdapterError):
                await client.remove_lora(body.lora_name, tenant=tenant or None)
        raise OpenAIError(400, str(error), param="lora_path", code="adapter_not_loaded") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(request: Request) -> Response:
    """Answer POST /v1/unload_lora_adapter. Requests enqueued before still finish with the adapter."""
    gateway, tenant = _permitted(request)
    body = await read_struct(request, UnloadBody)
    is_repeated = await _is_repeated(request)
    try:
        await while_connected(request, gateway.client.remove_lora(body.lora_name, tenant=tenant or None))
    except UnknownAdapterError as error:
        if not is_repeated:
            raise OpenAIError(404, str(error), param="lora_name", code="adapter_not_found") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _is_repeated(request: Request) -> bool:
    """Return whether an earlier call had the same ``Idempotency-Key`` and body."""
    entry = await reserve(request)
    return entry is not None and not entry[1]


def _permitted(request: Request) -> tuple[Gateway, str]:
    """Return the gateway and the tenant whose names are changed: that of the key, or everybody's without API keys.

    Raises:
        OpenAIError: 403, the gateway was started without --lora-updating.
    """
    gateway = gateway_of(request)
    if not gateway.settings.lora_updating:
        raise OpenAIError(
            403, "this gateway does not change adapters; start it with --lora-updating on", code="lora_updating_off"
        )
    return gateway, request.state.identity.tenant if gateway.settings.api_keys else EVERYBODY


_STATUSES = (400, 403, 409, 413, 499)

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/load_lora_adapter",
        handler=load,
        summary="Name an adapter, and load it at all engines",
        body=LoadBody,
        media_type="text/plain",
        statuses=_STATUSES,
    ),
    Operation(
        method="POST",
        path="/v1/unload_lora_adapter",
        handler=unload,
        summary="Remove the name of an adapter, and unload it",
        body=UnloadBody,
        media_type="text/plain",
        statuses=_STATUSES,
    ),
)
