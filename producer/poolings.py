"""Requests that pool their prompts: embeddings, classes, scores."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import msgspec

from ..shared.deployment.records import ModelCard
from ..shared.errors import UnsupportedTaskError, ValidationError
from ..shared.messages.deltas import Delta
from ..shared.messages.outcome import Usage
from ..shared.params.pooling import PoolingParams
from ..shared.values.names import check_name
from ..shared.values.shown import shown
from .client_core import ClientCore
from .inputs.options import RequestOptions
from .inputs.prompt import Prompt, as_prompts
from .inputs.prompt_names import naming, numbered
from .inputs.text_pairs import names_of_pairs, pairs_of
from .io_processors import IOProcessors
from .requests.queue_entry import Outgoing
from .results.pooling import (
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
from .together import together

# Followed at once: more would wait in the queue all the same.
MAX_IN_FLIGHT = 4096


class Poolings(ClientCore):
    """The part of the client that pools prompts; ``_io_processors`` turn data of other kinds into them."""

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

        A ``request_id`` that is known attaches to that request, and gives its result without computing it again.
        Of a ``DataPrompt`` an I/O processor makes any number of prompts, and one answer of their outputs.

        Raises:
            UnsupportedTaskError: the model does not do ``params.task``; names what it does.
            UnsupportedParameterError: there is no such I/O processor.
            RequestFailedError: it raised; ``code`` is "io_processor_failed".
            and as ``stream``.
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
        """``encode`` many prompts at once, and return their outputs in order.

        They are enqueued in a few calls, wait and run as requests of their own, and may be served by several engines.
        With a ``request_id`` that of the prompt at ``i`` is ``request_id-i`` (of a single one the id itself), so that
        the same call made again attaches to all of them. An error of one is raised once the others have been cancelled.

        Args:
            on_output: called whenever one is done.

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
        """``encode_all``; an error that is about a prompt calls it as ``names`` do."""
        card = await self._builder.checked_card(options)
        outgoing: list[Outgoing] = []
        for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
            with naming(name):
                own = _own_options(options, index, len(prompts))
                outgoing.append(self._builder.pooling(prompt, params, own, card))
        in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)

        async def one(prompt: Prompt | TextPair, name: str, single: Outgoing) -> PoolingRequestOutput:
            last: Delta | None = None
            with naming(name):
                async with in_flight, self._requests.interactive(single) as deltas:
                    async for delta in deltas:
                        last = delta
            on_output()
            return output_of(single.request.request_id, card.model, prompt, last)

        return await together([one(*each) for each in zip(prompts, names, outgoing, strict=True)])

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Embed one prompt or many; ``output.outputs.embedding`` is its vector. Raises: as ``encode_all``."""
        outputs = await self.encode_all(as_prompts(prompts), _of_task(params, "embed"), **options)
        return [
            EmbeddingRequestOutput(
                **_common(one), prompt=one.prompt, outputs=EmbeddingOutput(embedding=one.outputs.vector)
            )
            for one in outputs
        ]

    async def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[ClassificationRequestOutput]:
        """Classify one prompt or many; ``output.outputs.probs`` has a number for each class.

        Raises: as ``encode_all``.
        """
        outputs = await self.encode_all(as_prompts(prompts), _of_task(params, "classify"), **options)
        return [
            ClassificationRequestOutput(
                **_common(one), prompt=one.prompt, outputs=ClassificationOutput(probs=one.outputs.vector)
            )
            for one in outputs
        ]

    async def score(
        self,
        texts: str | Sequence[str],
        others: str | Sequence[str],
        params: PoolingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[ScoringRequestOutput]:
        """Say how well texts go with others: each with its counterpart, or one with all of them.

        A model with one class judges each pair (a cross-encoder); of one that embeds it is the cosine.

        Raises:
            ValidationError: there are several texts, and not as many others.
            UnsupportedTaskError: the model neither embeds nor has exactly one class.
            and as ``encode_all``.
        """
        pairs = pairs_of(texts, others)
        names = names_of_pairs(texts, others, len(pairs))
        card = await self._builder.checked_card(options)
        if _judges_pairs(card):
            wanted, against = [TextPair(*pair) for pair in pairs], [name for _, name in names]
            outputs = await self._pooled(wanted, against, _of_task(params, "classify"), options)
            scored = [(one, one.outputs.vector[0]) for one in outputs]
        else:
            scored = await self._cosines(pairs, names, _of_task(params, "embed"), options)
        return [
            ScoringRequestOutput(**_common(one), prompt=pair, outputs=ScoringOutput(score=score))
            for (one, score), pair in zip(scored, pairs, strict=True)
        ]

    async def _processed(
        self, prompt: DataPrompt, params: PoolingParams | None, options: RequestOptions
    ) -> ProcessedRequestOutput:
        """What an I/O processor makes of data, and of what its prompts are pooled to."""
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
        """The cosine of each pair; a text that comes several times is embedded once."""
        name_of: dict[str, str] = {}
        for pair, named in zip(pairs, names, strict=True):
            for text, name in zip(pair, named, strict=True):
                name_of.setdefault(text, name)
        pooled = await self._pooled(list(name_of), list(name_of.values()), params, options)
        outputs = dict(zip(name_of, pooled, strict=True))
        vectors = {text: output.outputs.vector for text, output in outputs.items()}
        return [(outputs[other], _cosine(vectors[text], vectors[other])) for text, other in pairs]


def _own_options(options: RequestOptions, index: int, num_prompts: int) -> RequestOptions:
    request_id = options.get("request_id")
    if request_id is None or num_prompts == 1:
        return options
    return {**options, "request_id": check_name("request_id", f"{request_id}-{index}")}


def _of_task(params: PoolingParams | None, task: str) -> PoolingParams:
    """``params`` with the task of the method that they are given to."""
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
    """What the output of each task says beside its result."""
    return {"request_id": output.request_id, "model": output.model, "usage": output.usage}
