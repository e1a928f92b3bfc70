"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: names of adapters changed over HTTP.

Whoever may call them has engines read folders, so they are off by default.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ....shared.adapter_errors import AdapterFileError, UnknownAdapterError, UnsupportedAdapterError
from ....shared.errors import EngineCallError, UnknownModelError, ValidationError
from ....shared.lora.registry import EVERYBODY
from ....shared.shown import shown
from ...openai.errors import OpenAIError, bad_field
from ..gateway import Gateway
from ..http import gateway_of, read_body, while_connected
from ..operations import Operation

B = TypeVar("B", "LoadBody", "UnloadBody")


class LoadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request: ``lora_path`` is a folder that gateway and engines see, ``load_inplace`` points a known name to it.

    ``base_model_name`` is the model that it is for; needed only where several are served.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The request; ``lora_int_id``, which vLLM has, is not needed."""

    lora_name: str
    lora_int_id: int | None = None


async def load(request: Request) -> Response:
    """Answer POST /v1/load_lora_adapter."""
    gateway, tenant = _permitted(request)
    body = await _read(request, LoadBody)
    known = [one for one in await gateway.client.adapters() if (one.name, one.tenant) == (body.lora_name, tenant)]
    if known and not body.load_inplace:
        message = f"lora_name {shown(body.lora_name)} is that of an adapter already; load_inplace points it to this one"
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
        if not known:
            # What cannot load it may not unload it either; and if nobody could, the name is gone already.
            with suppress(EngineCallError, UnknownAdapterError):
                await client.remove_lora(body.lora_name, tenant=tenant or None)
        raise OpenAIError(400, str(error), param="lora_path", code="adapter_not_loaded") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(request: Request) -> Response:
    """Answer POST /v1/unload_lora_adapter. Requests that were enqueued before end with the adapter."""
    gateway, tenant = _permitted(request)
    body = await _read(request, UnloadBody)
    try:
        await while_connected(request, gateway.client.remove_lora(body.lora_name, tenant=tenant or None))
    except UnknownAdapterError as error:
        raise OpenAIError(404, str(error), param="lora_name", code="adapter_not_found") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _permitted(request: Request) -> tuple[Gateway, str]:
    """Return the gateway, and whose names are changed: those of the key's tenant, or everybody's where there are none.

    Raises:
        OpenAIError: 403, it was not started for that.
    """
    gateway = gateway_of(request)
    if not gateway.settings.lora_updating:
        raise OpenAIError(
            403, "adapters cannot be changed here; start the gateway with --lora-updating", code="lora_updating_off"
        )
    return gateway, request.state.identity.tenant if gateway.settings.api_keys else EVERYBODY


async def _read(request: Request, kind: type[B]) -> B:
    return msgspec.json.decode(await read_body(request, gateway_of(request).settings.max_body_bytes), type=kind)


_STATUSES = (400, 403, 413, 499)

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
        summary="Take the name of an adapter away, and unload it",
        body=UnloadBody,
        media_type="text/plain",
        statuses=_STATUSES,
    ),
)
