"""/v1/models: what is served here."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....shared.records import ModelCard
from ....shared.shown import shown
from ...openai.errors import OpenAIError
from ..http import gateway_of, json_response
from ..operations import Operation


class Model(msgspec.Struct, kw_only=True):
    """One model. ``max_model_len`` is vLLM's; ``created`` is when a worker last began to serve it, in Unix time."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """All models that workers have served on this Redis."""

    object: Literal["list"]
    data: list[Model]


async def list_models(request: Request) -> Response:
    """Answer GET /v1/models."""
    cards = await gateway_of(request).client.models()
    return json_response(ModelList(object="list", data=[_model(cards[name]) for name in sorted(cards)]))


async def retrieve_model(request: Request) -> Response:
    """Answer GET /v1/models/{model}."""
    name = request.path_params["model"]
    card = (await gateway_of(request).client.models()).get(name)
    if card is None:
        raise OpenAIError(404, f"no worker has ever served model {shown(name)}", param="model", code="model_not_found")
    return json_response(_model(card))


def _model(card: ModelCard) -> Model:
    return Model(
        id=card.model,
        object="model",
        created=int(card.registered_at),
        owned_by="penstock",
        max_model_len=card.max_model_len,
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
