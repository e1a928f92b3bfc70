"""/v1/embeddings, /classify, /pooling, /score and /rerank: the endpoints of pooling models."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
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
from ...inputs.prompt_lists import pairs_of
from ...openai.answers.common import created_at, new_id
from ...openai.endpoints import EMBEDDINGS
from ...openai.errors import OpenAIError, cancelled, expired
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
from ...results import DataPrompt, PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from .. import generations
from ..http import add_ids, gateway_of, json_response, read_struct, while_connected
from ..idempotency import reserved
from ..operations import Operation
from ..place import place_of
from ..reservations import HEADER, Reservation
from .generate import prepare, reserved_id

T = TypeVar("T")


async def embeddings(request: Request) -> Response:
    """Answer POST /v1/embeddings."""
    prepared, _ = await prepare(request, EMBEDDINGS)
    assert isinstance(prepared, PreparedEmbeddings)
    response_id, outputs = await _pool_prompts(request, prepared)
    return json_response(prepared.answer(*outputs, response_id=response_id))


async def _response_id(request: Request, prefix: str, model: str | None, *num_prompts: int) -> str:
    """Return a new id, or that of the reservation of a body with an ``Idempotency-Key``.

    Args:
        num_prompts: possible numbers of requests of the body.
    """

    def request_ids(reservation: Reservation) -> list[str]:
        response_id = reserved_id(prefix, reservation)
        return [request_id_of_prompt(response_id, index, num) for num in num_prompts for index in range(num)]

    resolve = partial(gateway_of(request).client.resolve_model, model)
    reservation = await reserved(request, request_ids, resolve)
    return new_id(prefix) if reservation is None else reserved_id(prefix, reservation)


async def classify(request: Request) -> Response:
    """Answer POST /classify."""
    body = await read_struct(request, ClassifyBody)
    prepared = body.prepared("classify", body.input, body.pooling_params("classify"))
    response_id, outputs = await _pool_prompts(request, prepared)
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
    body = await read_struct(request, PoolBody)
    params = body.pooling_params(body.model_task, dimensions=body.dimensions)
    if (data_prompt := body.data_prompt()) is not None:
        return await _pool_data(request, body, data_prompt, params)
    assert body.input is not None
    prepared = body.prepared("pool", body.input, params)
    response_id, outputs = await _pool_prompts(request, prepared)
    is_base64 = body.encoding_format == "base64"
    data = [PoolingData(i, _encoded(output.outputs, is_base64=is_base64)) for i, output in enumerate(outputs)]
    return json_response(PoolingResponse(data=data, **_head(response_id, body.model, outputs)))


async def _pool_data(request: Request, body: PoolBody, data_prompt: DataPrompt, params: PoolingParams) -> Response:
    """Return the answer of an I/O processor to the data of a body."""
    if HEADER in request.headers:
        raise OpenAIError(400, f"{HEADER} cannot be used with data, since an I/O processor answers", param=HEADER)
    gateway = gateway_of(request)
    processor = gateway.io_processors.find(data_prompt.io_processor)
    prepared = msgspec.structs.replace(body.prepared("pool", "-", params), fields={"prompt": "data"})
    response_id = new_id(prepared.id_prefix)
    work = gateway.client.encode(data_prompt, params, **_options(request, prepared, response_id))
    output = await _run(request, prepared, response_id, work)
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
    body = await read_struct(request, ScoreBody)
    response_id, outputs = await _score_pairs(request, "score", body, *body.pairs(), body.names())
    data = [Score(index, output.outputs.score) for index, output in enumerate(outputs)]
    return json_response(Scores(data=data, **_head(response_id, body.model, outputs)))


async def rerank(request: Request) -> Response:
    """Answer POST /rerank."""
    body = await read_struct(request, RerankBody)
    texts, names = body.texts(), {"texts": "query", "others": "documents"}
    response_id, outputs = await _score_pairs(request, "rerank", body, body.query, texts, names)
    order = sorted(range(len(texts)), key=lambda index: -outputs[index].outputs.score)
    results = [
        Ranked(index, outputs[index].outputs.score, None if body.return_documents is False else Document(texts[index]))
        for index in order[: body.top_n or len(order)]
    ]
    usage = RerankUsage(PoolingUsage.sum_of(outputs).total_tokens)
    return json_response(Reranked(response_id, body.model or outputs[0].model, usage, results))


async def _pool_prompts(request: Request, prepared: PreparedPooling) -> tuple[str, list[PoolingRequestOutput]]:
    """Return the id and the outputs of the prompts of a body. They are cancelled if the caller disconnects."""
    response_id = await _response_id(request, prepared.id_prefix, prepared.model, len(prepared.prompts))
    options = _options(request, prepared, response_id)
    work = gateway_of(request).client.encode_all(prepared.prompts, prepared.params, **options)
    first_id = request_id_of_prompt(response_id, 0, len(prepared.prompts))
    return response_id, await _run(request, prepared, first_id, work)


async def _score_pairs(
    request: Request,
    prefix: str,
    body: PoolingBody,
    texts: str | list[str],
    others: str | list[str],
    names: dict[str, str],
) -> tuple[str, list[ScoringRequestOutput]]:
    """Return the id and the scores of pairs. An embedding model embeds each text once, a cross-encoder each pair."""
    prepared = msgspec.structs.replace(body.prepared(prefix, "-", body.pooling_params(None)), fields=names)
    with prepared.naming_fields():
        pairs = pairs_of(texts, others)
    num_texts = len({text for pair in pairs for text in pair})
    response_id = await _response_id(request, prefix, prepared.model, *{len(pairs), num_texts})
    options = _options(request, prepared, response_id)
    work = gateway_of(request).client.score(texts, others, prepared.params, **options)
    first_id = request_id_of_prompt(response_id, 0, num_texts)
    return response_id, await _run(request, prepared, first_id, work)


async def _run(request: Request, prepared: PreparedPooling, request_id: str, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, whose first request has the id ``request_id``. It ends if the caller leaves."""
    place = place_of(request, prepared.model, request_id)
    with prepared.naming_fields(), _http_errors():
        return await while_connected(request, place.during(work))


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


_operation = partial(Operation, method="POST", statuses=(400, 408, 409, 413, 429, 499))

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
