"""/v1/models: the models served, and the adapters that the caller may name."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....shared.deployment.records import ModelCard
from ....shared.lora.registry import AdapterRecord
from ....shared.values.shown import shown
from ...openai.errors import OpenAIError
from ..http import gateway_of, json_response
from ..operations import Operation


class Model(msgspec.Struct, kw_only=True):
    """A model or adapter. ``created`` is when a worker last started to serve the model, or when the adapter was
    named, in Unix time.

    ``max_model_len``, ``root`` and ``parent`` are vLLM's fields; for an adapter, ``root`` is its folder and ``parent``
    its model.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None


class ModelList(msgspec.Struct, kw_only=True):
    """All models that workers have served on this Redis, and the adapters of the caller's tenant and of everybody."""

    object: Literal["list"]
    data: list[Model]


async def list_models(request: Request) -> Response:
    """Answer GET /v1/models."""
    return json_response(ModelList(object="list", data=list((await _models(request)).values())))


async def retrieve_model(request: Request) -> Response:
    """Answer GET /v1/models/{model}."""
    name = request.path_params["model"]
    model = (await _models(request)).get(name)
    if model is None:
        raise OpenAIError(404, f"no worker has ever served model {shown(name)}", param="model", code="model_not_found")
    return json_response(model)


async def _models(request: Request) -> dict[str, Model]:
    """Return models and adapters by name. An adapter is omitted if its model is unknown, or if a model has its name."""
    client = gateway_of(request).client
    cards = await client.models()
    models = {name: _model(cards[name]) for name in sorted(cards)}
    for record in await client.visible_adapters(request.state.identity.tenant):
        if record.model in cards:
            models.setdefault(record.name, _adapter(record, cards[record.model]))
    return models


def _model(card: ModelCard) -> Model:
    return Model(
        id=card.model,
        object="model",
        created=int(card.registered_at),
        owned_by="penstock",
        max_model_len=card.max_model_len,
        root=card.model,
        parent=None,
    )


def _adapter(record: AdapterRecord, card: ModelCard) -> Model:
    return Model(
        id=record.name,
        object="model",
        created=int(record.added_at),
        owned_by="penstock",
        max_model_len=card.max_model_len,
        root=record.path,
        parent=record.model,
    )


OPERATIONS = (
    Operation(method="GET", path="/v1/models", handler=list_models, summary="List models", response=ModelList),
    Operation(
        method="GET",
        path="/v1/models/{model:path}",
        handler=retrieve_model,
        summary="Describe a model",
        response=Model,
    ),
)
