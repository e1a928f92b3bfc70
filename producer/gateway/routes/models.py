"""/v1/models: the models served, and the adapters that the caller may name; in OpenAI's form or Anthropic's."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....shared.deployment.records import ModelCard
from ....shared.keys import Keys
from ....shared.lora.registry import AdapterRecord
from ....shared.params.kinds import GENERATE
from ....shared.queue.stats import ModelState, QueueStats
from ....shared.values.shown import shown
from ...anthropic.batches import rfc3339
from ...control.deployment import stats_soon
from ...openai.errors import OpenAIError
from ..http import gateway_of, json_response
from ..operations import Operation

Capability = Literal["chat", "completions", "embeddings", "reasoning", "structured_outputs", "tools", "vision"]


class ModelStatus(msgspec.Struct):
    """State of a model, as llama.cpp's router names it: "loaded", "loading", "asleep", "unloaded" or "broken"."""

    value: ModelState


class Model(msgspec.Struct, kw_only=True):
    """A model or adapter. ``created`` is when a worker last started to serve the model, or when the adapter was
    named, in Unix time.

    ``max_model_len``, ``root`` and ``parent`` are vLLM's fields; for an adapter, ``root`` is its folder and ``parent``
    its model. ``context_length`` and ``max_output_tokens`` are the same limit under the names that agents read, since
    prompt and output share it. ``capabilities`` are names of what its requests may use. ``estimated_ready_s`` is 0
    while an engine claims, and null if no device may wake one. It and ``status`` are null if Redis does not answer.
    ``error`` says why a broken model cannot be served; it is null for others.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None
    context_length: int
    max_output_tokens: int
    capabilities: list[Capability]
    status: ModelStatus | None
    estimated_ready_s: float | None
    error: str | None


class ModelList(msgspec.Struct, kw_only=True):
    """All models that workers have served on this Redis, and the adapters of the caller's tenant and of everybody.

    One without workers is listed, too, since its first request may start one: ``penstock models --forget`` removes it.
    """

    object: Literal["list"]
    data: list[Model]


class AnthropicModel(msgspec.Struct, kw_only=True):
    """A model or adapter in the form of Anthropic's API, for requests with one of its headers."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    lifecycle: Literal["active"] = "active"


class AnthropicModelList(msgspec.Struct, kw_only=True):
    """All models and adapters, in the form of Anthropic's API. There is one page."""

    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


async def list_models(request: Request) -> Response:
    """Answer GET /v1/models."""
    models = list((await _models(request)).values())
    if not _is_for_anthropic(request):
        return json_response(ModelList(object="list", data=models))
    ids = [model.id for model in models] or [None]
    data = [_in_anthropic_form(model) for model in models]
    return json_response(AnthropicModelList(data=data, first_id=ids[0], last_id=ids[-1]))


async def retrieve_model(request: Request) -> Response:
    """Answer GET /v1/models/{model}."""
    name = request.path_params["model"]
    model = (await _models(request)).get(name)
    if model is None:
        raise OpenAIError(404, f"no worker has ever served model {shown(name)}", param="model", code="model_not_found")
    return json_response(_in_anthropic_form(model) if _is_for_anthropic(request) else model)


def _is_for_anthropic(request: Request) -> bool:
    """Return whether the caller is a client of Anthropic's API, by the headers that such clients send."""
    return "anthropic-version" in request.headers or "x-api-key" in request.headers


def _in_anthropic_form(model: Model) -> AnthropicModel:
    max_tokens = model.max_model_len or None
    return AnthropicModel(
        id=model.id,
        display_name=model.id,
        created_at=rfc3339(model.created),
        max_input_tokens=max_tokens,
        max_tokens=max_tokens,
    )


async def _models(request: Request) -> dict[str, Model]:
    """Return models and adapters by name. An adapter is omitted if its model is unknown, or if a model has its name."""
    gateway = gateway_of(request)
    cards, keys = await gateway.client.models(), Keys(gateway.settings.namespace)
    names = sorted(cards)
    stats = await asyncio.gather(*(stats_soon(gateway.connection, keys, name) for name in names))
    stats_of = dict(zip(names, stats, strict=True))
    models = {name: _model(cards[name], stats_of[name]) for name in names}
    for record in await gateway.client.visible_adapters(request.state.identity.tenant):
        if record.model in cards:
            models.setdefault(record.name, _adapter(record, cards[record.model], stats_of[record.model]))
    return models


def _model(card: ModelCard, stats: QueueStats | None) -> Model:
    return Model(
        id=card.model,
        object="model",
        created=int(card.registered_at),
        owned_by="penstock",
        max_model_len=card.max_model_len,
        root=card.model,
        parent=None,
        **_limits(card),
        **_readiness(stats),
    )


def _adapter(record: AdapterRecord, card: ModelCard, stats: QueueStats | None) -> Model:
    return Model(
        id=record.name,
        object="model",
        created=int(record.added_at),
        owned_by="penstock",
        max_model_len=card.max_model_len,
        root=record.path,
        parent=record.model,
        **_limits(card),
        **_readiness(stats),
    )


def _readiness(stats: QueueStats | None) -> dict[str, Any]:
    if stats is None:
        return {"status": None, "estimated_ready_s": None, "error": None}
    readiness = stats.readiness
    return {
        "status": ModelStatus(readiness.state),
        "estimated_ready_s": readiness.in_s,
        "error": readiness.error or None,
    }


def _limits(card: ModelCard) -> dict[str, Any]:
    """Return the fields of a model that describe what its requests may use."""
    generates = GENERATE in card.supported_tasks
    has_grammars = card.setup is not None and bool(card.setup.structured_outputs_backend)
    capabilities = {
        "chat": generates and card.has_chat_template,
        "completions": generates,
        "embeddings": card.pooling is not None,
        "reasoning": bool(card.reasoning_parser),
        "structured_outputs": generates and has_grammars,
        "tools": generates and card.has_chat_template and bool(card.tool_call_parser),
        "vision": bool(card.max_images),
    }
    return {
        "context_length": card.max_model_len,
        "max_output_tokens": card.max_model_len,
        "capabilities": [name for name, is_offered in capabilities.items() if is_offered],
    }


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
