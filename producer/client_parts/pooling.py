"""Pooling requests: embeddings, classes and scores of prompts."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import msgspec

from ...shared.deployment.records import ModelCard
from ...shared.errors import UnsupportedTaskError, ValidationError
from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import Usage
from ...shared.params.pooling import PoolingParams
from ...shared.values.names import check_name
from ...shared.values.shown import shown
from ..background.concurrency import run_all
from ..inputs.options import RequestOptions
from ..inputs.prompt import Prompt, as_prompts
from ..inputs.prompt_lists import names_of_pairs, naming, numbered, pairs_of
from ..io_processors import IOProcessors
from ..requests.queue_entry import Outgoing
from ..results import (
    ClassificationOutput,
    ClassificationRequestOutput,
    DataPrompt,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ProcessedRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    TextPair,
    output_of,
)
from .core import ClientCore

# Limit of requests followed at a time. More would only wait in the queue.
MAX_IN_FLIGHT = 4096


class Poolings(ClientCore):
    """The part of the client that pools prompts; ``_io_processors`` turn other data into prompts."""

    _io_processors: IOProcessors

    @overload
    async def encode(
        self, prompt: DataPrompt, params: PoolingParams | None = None, **options: Unpack[RequestOptions]
    ) -> ProcessedRequestOutput: ...

    @overload
    async def encode(
        self, prompt: Prompt | TextPair, params: PoolingParams | None = None, **options: Unpack[RequestOptions]
    ) -> PoolingRequestOutput: ...

    async def encode(
        self,
        prompt: DataPrompt | Prompt | TextPair,
        params: PoolingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> ProcessedRequestOutput | PoolingRequestOutput:
        """Embed or classify ``prompt``, as ``params.task`` says. Cancelling the awaiting task cancels the request.

        A known ``request_id`` attaches to that request, and returns its result without computing it again. For a
        ``DataPrompt``, an I/O processor creates any number of prompts, and combines their outputs into one answer.

        Raises:
            UnsupportedTaskError: the model does not support ``params.task``; lists its tasks.
            UnsupportedParameterError: the I/O processor is unknown.
            RequestFailedError: the I/O processor raised an error; ``code`` is "io_processor_failed".
            PenstockError: any error of ``stream``.
        """
        if isinstance(prompt, DataPrompt):
            return await self._processed(prompt, params, options)
        (output,) = await self.encode_all([prompt], params, **options)
        return output

    async def encode_all(
        self,
        prompts: Sequence[Prompt | TextPair],
        params: PoolingParams | None = None,
        *,
        on_output: Callable[[], object] = lambda: None,
        **options: Unpack[RequestOptions],
    ) -> list[PoolingRequestOutput]:
        """``encode`` many prompts in one batch, and return their outputs in order.

        They are enqueued in a few calls, wait and run as separate requests, and may be served by several engines. With
        a ``request_id``, the prompt at ``i`` has the id ``request_id-i`` (a single prompt the id itself), so that
        repeating the call attaches to all of them. An error of one prompt is raised after the others have been
        cancelled.

        Args:
            on_output: called whenever a prompt is done.

        Raises: as ``encode``.
        """
        each = as_prompts(prompts)
        return await self._pooled(each, numbered("prompt", each), params, options, on_output)

    async def _pooled(
        self,
        prompts: Sequence[Prompt | TextPair],
        names: Sequence[str],
        params: PoolingParams | None,
        options: RequestOptions,
        on_output: Callable[[], object] = lambda: None,
    ) -> list[PoolingRequestOutput]:
        """Pool prompts as ``encode_all`` does. ``names`` identify the prompts in error messages."""
        card = await self._builder.checked_card(options)
        outgoing: list[Outgoing] = []
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            with naming(name):
                prompt_options = _options_of_prompt(options, index, len(prompts))
                outgoing.append(self._builder.pooling(prompt, params, prompt_options, card))
        in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def pool_one(prompt: Prompt | TextPair, name: str, single: Outgoing) -> PoolingRequestOutput:
            last: Delta | None = None
            with naming(name):
                async with in_flight, self._requests.interactive(single) as deltas:
                    async for delta in deltas:
                        last = delta
            on_output()
            return output_of(single.request.request_id, card.model, prompt, last)

        return await run_all([pool_one(*each) for each in zip(prompts, names, outgoing, strict=True)])

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        *,
        on_output: Callable[[], object] = lambda: None,
        **options: Unpack[RequestOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Embed one prompt or many; ``output.outputs.embedding`` is the vector of each. As ``encode_all``."""
        outputs = await self.encode_all(
            as_prompts(prompts), _with_task(params, "embed"), on_output=on_output, **options
        )
        return [
            EmbeddingRequestOutput(
                **_common(output), prompt=output.prompt, outputs=EmbeddingOutput(embedding=output.outputs.vector)
            )
            for output in outputs
        ]

    async def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        *,
        on_output: Callable[[], object] = lambda: None,
        **options: Unpack[RequestOptions],
    ) -> list[ClassificationRequestOutput]:
        """Classify one prompt or many; ``output.outputs.probs`` has a number for each class. As ``encode_all``."""
        outputs = await self.encode_all(
            as_prompts(prompts), _with_task(params, "classify"), on_output=on_output, **options
        )
        return [
            ClassificationRequestOutput(
                **_common(output), prompt=output.prompt, outputs=ClassificationOutput(probs=output.outputs.vector)
            )
            for output in outputs
        ]

    async def score(
        self,
        texts: str | Sequence[str],
        others: str | Sequence[str],
        params: PoolingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[ScoringRequestOutput]:
        """Score how well texts match others: each text with its counterpart, or one text with all others.

        A model with one class judges each pair (a cross-encoder). For an embedding model the score is the cosine.

        Raises:
            ValidationError: there are several texts, and a different number of others.
            UnsupportedTaskError: the model neither embeds nor has exactly one class.
            PenstockError: any error of ``encode_all``.
        """
        pairs = pairs_of(texts, others)
        names = names_of_pairs(texts, others, len(pairs))
        card = await self._builder.checked_card(options)
        if _judges_pairs(card):
            text_pairs, other_names = [TextPair(*pair) for pair in pairs], [name for _, name in names]
            outputs = await self._pooled(text_pairs, other_names, _with_task(params, "classify"), options)
            scored = [(output, output.outputs.vector[0]) for output in outputs]
        else:
            scored = await self._cosines(pairs, names, _with_task(params, "embed"), options)
        return [
            ScoringRequestOutput(**_common(output), prompt=pair, outputs=ScoringOutput(score=score))
            for (output, score), pair in zip(scored, pairs, strict=True)
        ]

    async def _processed(
        self, prompt: DataPrompt, params: PoolingParams | None, options: RequestOptions
    ) -> ProcessedRequestOutput:
        """Have an I/O processor turn data into prompts, pool them, and turn their outputs into one answer."""
        processor = self._io_processors.find(prompt.io_processor)
        card = await self._builder.checked_card(options)
        request_id = options.get("request_id") or os.urandom(16).hex()
        prompts = await processor.prompts(prompt.data, request_id)
        options["request_id"] = request_id
        outputs = await self.encode_all(prompts, processor.params(params), **options)
        num_tokens = sum(output.usage.num_prompt_tokens for output in outputs if output.usage is not None)
        return ProcessedRequestOutput(
            request_id=request_id,
            model=card.model,
            prompt=prompt,
            outputs=await processor.answer(outputs, request_id),
            usage=Usage(num_prompt_tokens=num_tokens),
        )

    async def _cosines(
        self,
        pairs: list[tuple[str, str]],
        names: list[tuple[str, str]],
        params: PoolingParams,
        options: RequestOptions,
    ) -> list[tuple[PoolingRequestOutput, float]]:
        """Return the cosine of each pair. A text that occurs several times is embedded once."""
        name_of: dict[str, str] = {}
        for pair, named in zip(pairs, names, strict=True):
            for text, name in zip(pair, named, strict=True):
                name_of.setdefault(text, name)
        pooled = await self._pooled(list(name_of), list(name_of.values()), params, options)
        outputs = dict(zip(name_of, pooled, strict=True))
        vectors = {text: output.outputs.vector for text, output in outputs.items()}
        return [(outputs[other], _cosine(vectors[text], vectors[other])) for text, other in pairs]


def _options_of_prompt(options: RequestOptions, index: int, num_prompts: int) -> RequestOptions:
    request_id = options.get("request_id")
    if request_id is None:
        return options
    return {**options, "request_id": request_id_of_prompt(request_id, index, num_prompts)}


def request_id_of_prompt(request_id: str, index: int, num_prompts: int) -> str:
    """Return the id of the request for one of the prompts of a call with ``request_id``."""
    return request_id if num_prompts == 1 else check_name("request_id", f"{request_id}-{index}")


def _with_task(params: PoolingParams | None, task: str) -> PoolingParams:
    """Return ``params`` with the task of the called method."""
    if params is None:
        return PoolingParams(task=task)
    if not isinstance(params, PoolingParams):
        raise ValidationError(f"params must be a PoolingParams, got {type(params).__name__}")
    if params.task not in (None, task):
        raise ValidationError(f"task must be {shown(task)} or left out here, got {shown(params.task)}; else use encode")
    return msgspec.structs.replace(params, task=task)


def _judges_pairs(card: ModelCard) -> bool:
    if "classify" in card.supported_tasks and card.pooling is not None and len(card.pooling.labels) == 1:
        return True
    if "embed" in card.supported_tasks:
        return False
    raise UnsupportedTaskError(
        f"model {shown(card.model)} does not score: it takes a model that embeds, or one with exactly one class "
        f"(tasks of the model: {', '.join(card.supported_tasks)})"
    )


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def _common(output: PoolingRequestOutput) -> dict[str, Any]:
    """Return the fields that the output of each task has in addition to its result."""
    return {"request_id": output.request_id, "model": output.model, "usage": output.usage}
