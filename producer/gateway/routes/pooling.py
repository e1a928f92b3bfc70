"""/v1/embeddings, /classify, /pooling, /score and /rerank: the endpoints of pooling models."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....shared.errors import RequestFailedError
from ....shared.messages.outcome import FinishReason
from ....shared.params.pooling import PoolingParams
from ...client_parts.pooling import request_id_of_prompt
from ...inputs.options import REPEAT_LINGER_S, RequestOptions
from ...openai.answers.common import created_at, new_id
from ...openai.endpoints import EMBEDDINGS
from ...openai.errors import cancelled, expired
from ...openai.pooling import (
    Classification,
    Classifications,
    ClassifyBody,
    Document,
    Embeddings,
    EmbeddingsBody,
    PoolBody,
    PoolingBody,
    PoolingData,
    PoolingResponse,
    PoolingUsage,
    PreparedEmbeddings,
    PreparedPooling,
    ProcessedResponse,
    Ranked,
    RerankBody,
    Reranked,
    RerankUsage,
    Score,
    ScoreBody,
    Scores,
    to_base64,
)
from ...openai.unknown_fields import decode_known
from ...results import DataPrompt, PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from .. import generations
from ..http import add_ids, gateway_of, json_response, read_body, while_connected
from ..idempotency import reserved
from ..operations import Operation
from ..reservations import HEADER, Reservation
from .generate import prepare, reserved_id

B = TypeVar("B", bound=PoolingBody)


async def embeddings(request: Request) -> Response:
    """Answer POST /v1/embeddings."""
    prepared, _ = await prepare(request, EMBEDDINGS)
    assert isinstance(prepared, PreparedEmbeddings)
    reservation = await _reserved(request, prepared)
    response_id = new_id(prepared.id_prefix) if reservation is None else reserved_id(prepared, reservation)
    outputs = await _pool_prompts(request, prepared, response_id)
    return json_response(prepared.answer(*outputs, response_id=response_id))


async def _reserved(request: Request, prepared: PreparedEmbeddings) -> Reservation | None:
    """Return the reservation of a body with an ``Idempotency-Key``; None without one."""

    def request_ids(reservation: Reservation) -> list[str]:
        response_id, num_prompts = reserved_id(prepared, reservation), len(prepared.prompts)
        return [request_id_of_prompt(response_id, index, num_prompts) for index in range(num_prompts)]

    resolve = partial(gateway_of(request).client.resolve_model, prepared.model)
    return await reserved(request, request_ids, resolve)


async def classify(request: Request) -> Response:
    """Answer POST /classify."""
    body = await _decode_body(request, ClassifyBody)
    prepared = body.prepared("classify", body.input, body.pooling_params("classify"))
    response_id = new_id(prepared.id_prefix)
    outputs = await _pool_prompts(request, prepared, response_id)
    card = await gateway_of(request).client.get_model_config(prepared.model)
    labels = dict(enumerate(() if card.pooling is None else card.pooling.labels))
    data = []
    for index, output in enumerate(outputs):
        probs = output.outputs.vector
        best = max(range(len(probs)), key=probs.__getitem__)
        data.append(Classification(index, labels.get(best, str(best)), probs, len(probs)))
    return json_response(Classifications(data=data, **_head(response_id, body.model, outputs)))


async def pool(request: Request) -> Response:
    """Answer POST /pooling."""
    body = await _decode_body(request, PoolBody)
    params = body.pooling_params(body.model_task, dimensions=body.dimensions)
    if (data_prompt := body.data_prompt()) is not None:
        return await _pool_data(request, body, data_prompt, params)
    assert body.input is not None
    prepared = body.prepared("pool", body.input, params)
    response_id = new_id(prepared.id_prefix)
    outputs = await _pool_prompts(request, prepared, response_id)
    is_base64 = body.encoding_format == "base64"
    data = [PoolingData(i, _encoded(output.outputs, is_base64=is_base64)) for i, output in enumerate(outputs)]
    return json_response(PoolingResponse(data=data, **_head(response_id, body.model, outputs)))


async def _pool_data(request: Request, body: PoolBody, data_prompt: DataPrompt, params: PoolingParams) -> Response:
    """Return the answer of an I/O processor to the data of a body."""
    gateway = gateway_of(request)
    processor = gateway.io_processors.find(data_prompt.io_processor)
    prepared = msgspec.structs.replace(body.prepared("pool", "-", params), fields={"prompt": "data"})
    response_id = new_id(prepared.id_prefix)
    work = gateway.client.encode(data_prompt, params, **_options(request, prepared, response_id))
    with prepared.naming_fields(), _http_errors():
        output = await while_connected(request, work)
    answer = ProcessedResponse(
        request_id=response_id,
        created_at=created_at(response_id),
        data=processor.response(output.outputs),
        model=body.model or output.model,
        usage=PoolingUsage.sum_of([output]),
    )
    return json_response(answer)


def _encoded(output: PoolingOutput, *, is_base64: bool) -> list[float | list[float]] | str:
    return to_base64(output.pooled) if is_base64 else [*output.data]


async def score(request: Request) -> Response:
    """Answer POST /score."""
    body = await _decode_body(request, ScoreBody)
    response_id = new_id("score")
    outputs = await _score_pairs(request, body, *body.pairs(), response_id, body.names())
    data = [Score(index, output.outputs.score) for index, output in enumerate(outputs)]
    return json_response(Scores(data=data, **_head(response_id, body.model, outputs)))


async def rerank(request: Request) -> Response:
    """Answer POST /rerank."""
    body = await _decode_body(request, RerankBody)
    texts, response_id = body.texts(), new_id("rerank")
    names = {"texts": "query", "others": "documents"}
    outputs = await _score_pairs(request, body, body.query, texts, response_id, names)
    order = sorted(range(len(texts)), key=lambda index: -outputs[index].outputs.score)
    results = [
        Ranked(index, outputs[index].outputs.score, None if body.return_documents is False else Document(texts[index]))
        for index in order[: body.top_n or len(order)]
    ]
    usage = RerankUsage(PoolingUsage.sum_of(outputs).total_tokens)
    return json_response(Reranked(response_id, body.model or outputs[0].model, usage, results))


async def _decode_body(request: Request, body_type: type[B]) -> B:
    settings = gateway_of(request).settings
    data = await read_body(request, settings.max_body_bytes)
    body, request.state.ignored = decode_known(data, body_type, strict=settings.strict_fields)
    return body


async def _pool_prompts(request: Request, prepared: PreparedPooling, response_id: str) -> list[PoolingRequestOutput]:
    """Return the outputs of the prompts of a body. They are cancelled if the caller disconnects."""
    options = _options(request, prepared, response_id)
    work = gateway_of(request).client.encode_all(prepared.prompts, prepared.params, **options)
    with prepared.naming_fields(), _http_errors():
        return await while_connected(request, work)


async def _score_pairs(
    request: Request,
    body: PoolingBody,
    texts: str | list[str],
    others: str | list[str],
    response_id: str,
    names: dict[str, str],
) -> list[ScoringRequestOutput]:
    prepared = msgspec.structs.replace(body.prepared("score", "-", body.pooling_params(None)), fields=names)
    options = _options(request, prepared, response_id)
    work = gateway_of(request).client.score(texts, others, prepared.params, **options)
    with prepared.naming_fields(), _http_errors():
        return await while_connected(request, work)


@contextmanager
def _http_errors() -> Generator[None]:
    """Raise the HTTP error of a request that expired or was cancelled instead of the client's exception."""
    try:
        yield
    except RequestFailedError as error:
        if error.code == FinishReason.EXPIRED:
            raise expired() from error
        if error.code in (FinishReason.CANCELLED, FinishReason.ABORT):
            raise cancelled() from error
        raise


def _options(request: Request, prepared: PreparedPooling, response_id: str) -> RequestOptions:
    options = generations.options_of(prepared, request.state.identity, gateway_of(request).settings)
    add_ids(options, request, response_id)
    options["request_id"] = response_id
    if HEADER in request.headers:
        options["linger_s"], options["read_ttl_s"] = REPEAT_LINGER_S, None  # another call may read the output
    return options


def _head(
    response_id: str, model: str | None, outputs: list[PoolingRequestOutput] | list[ScoringRequestOutput]
) -> dict[str, Any]:
    """Return the fields that most responses have in addition to their data."""
    usage = PoolingUsage.sum_of(outputs)
    return {"id": response_id, "created": created_at(response_id), "model": model or outputs[0].model, "usage": usage}


_operation = partial(Operation, method="POST", statuses=(400, 408, 413, 429, 499))

OPERATIONS = (
    _operation(path=EMBEDDINGS, handler=embeddings, summary="Embed texts", body=EmbeddingsBody, response=Embeddings),
    _operation(
        path="/classify", handler=classify, summary="Classify texts", body=ClassifyBody, response=Classifications
    ),
    _operation(path="/pooling", handler=pool, summary="Pool texts", body=PoolBody, response=PoolingResponse),
    *(
        _operation(path=path, handler=score, summary="Score pairs of texts", body=ScoreBody, response=Scores)
        for path in ("/v1/score", "/score")
    ),
    *(
        _operation(path=path, handler=rerank, summary="Rank documents", body=RerankBody, response=Reranked)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
)
