"""/v1/embeddings, /classify, /pooling, /score and /rerank: what models that pool are asked."""

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
from ...inputs.options import RequestOptions
from ...openai.answers.response_ids import created_at, new_id
from ...openai.embeddings import Embeddings, EmbeddingsBody, PreparedEmbeddings
from ...openai.endpoints import EMBEDDINGS
from ...openai.errors import cancelled, expired
from ...openai.pool_body import PoolBody, PoolingData, PoolingResponse, ProcessedResponse
from ...openai.pooling import (
    Classification,
    Classifications,
    ClassifyBody,
    Document,
    PoolingBody,
    PoolingUsage,
    PreparedPooling,
    Ranked,
    RerankBody,
    Reranked,
    RerankUsage,
    Score,
    ScoreBody,
    Scores,
    in_base64,
)
from ...results.pooling import DataPrompt, PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from .. import generations
from ..http import add_ids, gateway_of, json_response, read_body, while_connected
from ..operations import Operation
from .generate import prepare

B = TypeVar("B", bound=PoolingBody)


async def embeddings(request: Request) -> Response:
    """Answer POST /v1/embeddings."""
    gateway = gateway_of(request)
    prepared, _ = await prepare(gateway, EMBEDDINGS, await read_body(request, gateway.settings.max_body_bytes))
    assert isinstance(prepared, PreparedEmbeddings)
    response_id = new_id(prepared.id_prefix)
    outputs = await _pooled(request, prepared, response_id)
    return json_response(prepared.answer(*outputs, response_id=response_id))


async def classify(request: Request) -> Response:
    """Answer POST /classify."""
    body = await _body(request, ClassifyBody)
    prepared = body.prepared("classify", body.input, body.pooling_params("classify"))
    response_id = new_id(prepared.id_prefix)
    outputs = await _pooled(request, prepared, response_id)
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
    body = await _body(request, PoolBody)
    params = body.pooling_params(body.model_task, dimensions=body.dimensions)
    if (given := body.data_prompt()) is not None:
        return await _answer_to_data(request, body, given, params)
    assert body.input is not None
    prepared = body.prepared("pool", body.input, params)
    response_id = new_id(prepared.id_prefix)
    outputs = await _pooled(request, prepared, response_id)
    is_base64 = body.encoding_format == "base64"
    data = [PoolingData(i, _told(one.outputs, is_base64=is_base64)) for i, one in enumerate(outputs)]
    return json_response(PoolingResponse(data=data, **_head(response_id, body.model, outputs)))


async def _answer_to_data(request: Request, body: PoolBody, given: DataPrompt, params: PoolingParams) -> Response:
    """What an I/O processor answers to the data of a body."""
    gateway = gateway_of(request)
    processor = gateway.io_processors.find(given.io_processor)
    prepared = msgspec.structs.replace(body.prepared("pool", "-", params), fields={"prompt": "data"})
    response_id = new_id(prepared.id_prefix)
    work = gateway.client.encode(given, params, **_options(request, prepared, response_id))
    with prepared.naming_fields(), _telling_ends():
        output = await while_connected(request, work)
    answer = ProcessedResponse(
        request_id=response_id,
        created_at=created_at(response_id),
        data=processor.response(output.outputs),
        model=body.model or output.model,
        usage=PoolingUsage.of([output]),
    )
    return json_response(answer)


def _told(output: PoolingOutput, *, is_base64: bool) -> list[float | list[float]] | str:
    return in_base64(output.pooled) if is_base64 else [*output.data]


async def score(request: Request) -> Response:
    """Answer POST /score."""
    body = await _body(request, ScoreBody)
    response_id = new_id("score")
    outputs = await _scored(request, body, *body.pairs(), response_id, body.names())
    data = [Score(index, output.outputs.score) for index, output in enumerate(outputs)]
    return json_response(Scores(data=data, **_head(response_id, body.model, outputs)))


async def rerank(request: Request) -> Response:
    """Answer POST /rerank."""
    body = await _body(request, RerankBody)
    texts, response_id = body.texts(), new_id("rerank")
    names = {"texts": "query", "others": "documents"}
    outputs = await _scored(request, body, body.query, texts, response_id, names)
    order = sorted(range(len(texts)), key=lambda index: -outputs[index].outputs.score)
    results = [
        Ranked(index, outputs[index].outputs.score, None if body.return_documents is False else Document(texts[index]))
        for index in order[: body.top_n or len(order)]
    ]
    usage = RerankUsage(PoolingUsage.of(outputs).total_tokens)
    return json_response(Reranked(response_id, body.model or outputs[0].model, usage, results))


async def _body(request: Request, kind: type[B]) -> B:
    return msgspec.json.decode(await read_body(request, gateway_of(request).settings.max_body_bytes), type=kind)


async def _pooled(request: Request, prepared: PreparedPooling, response_id: str) -> list[PoolingRequestOutput]:
    """The outputs of the prompts of a body; a caller that leaves cancels them."""
    options = _options(request, prepared, response_id)
    work = gateway_of(request).client.encode_all(prepared.prompts, prepared.params, **options)
    with prepared.naming_fields(), _telling_ends():
        return await while_connected(request, work)


async def _scored(
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
    with prepared.naming_fields(), _telling_ends():
        return await while_connected(request, work)


@contextmanager
def _telling_ends() -> Generator[None]:
    """Of what ends without a result an answer over HTTP has words of its own."""
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
    return options


def _head(
    response_id: str, model: str | None, outputs: list[PoolingRequestOutput] | list[ScoringRequestOutput]
) -> dict[str, Any]:
    """What most responses say beside their data."""
    usage = PoolingUsage.of(outputs)
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
