"""Builds single requests from a caller's arguments: finds the model, checks the options, fans out the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ...shared.deployment.records import ModelCard
from ...shared.errors import UnsupportedParameterError, ValidationError
from ...shared.messages.requests import EngineCoreRequest
from ...shared.params.pooling import PoolingParams
from ...shared.params.sampling import SamplingParams
from ...shared.values.arguments import check_argument_names
from ...shared.values.shown import shown
from ..inputs.lora import AdapterResolver
from ..inputs.options import RequestOptions
from ..inputs.prompt import Prompt, build_pooling_request, build_request
from ..results import TextPair
from ..webhooks.targets import webhook_target
from .digests import content_of
from .fan_out import children
from .model_cards import ModelCards
from .queue_entry import Outgoing
from .single_requests import SingleRequests

MANY_PARTS = 1000
# Options of vLLM's clients that have no meaning here, with their remedies.
_NOT_OURS = {
    "arrival_time": "the clock of Redis says when a request arrived; leave it out",
    "data_parallel_rank": "engines take requests by themselves, so none can be chosen; leave it out",
    "prompt_adapter_request": "there are no prompt adapters; leave it out",
    "prompt_text": "a prompt has one form; pass text as the prompt",
}


class RequestBuilder:
    """Builds requests for known models.

    Args:
        tenant: tenant of requests that name none.
    """

    def __init__(self, requests: SingleRequests, cards: ModelCards, adapters: AdapterResolver, tenant: str) -> None:
        self._requests = requests
        self._cards = cards
        self._adapters = adapters
        self.tenant = tenant

    async def card(self, model: str | None) -> ModelCard:
        """Return the card of the named model. The name of an adapter gives the card of its base.

        Raises:
            ClientClosedError: the client is not connected.
            UnknownModelError, ValidationError: as ``ModelCards.find``.
        """
        self.check_open()
        name = self._cards.unknown_name(model)
        record = None if name is None else await self._adapters.named_by_any_tenant(name, self.tenant)
        return await self._cards.find(model if record is None else record.model)

    async def fresh_cards(self) -> dict[str, ModelCard]:
        """Return all cards as they are in Redis now, by model name."""
        self.check_open()
        return await self._cards.read()

    async def forget(self, model: str) -> None:
        """Remove a model's card, as ``ModelCards.forget``."""
        self.check_open()
        await self._cards.forget(model)

    async def checked_card(self, options: RequestOptions) -> ModelCard:
        """Check that all ``options`` exist, and return the card of their model.

        Replaces an adapter that they name, as ``lora_request`` or as ``model``, by its resolved form in ``options``.

        Raises:
            UnknownAdapterError, AdapterFileError: as ``AdapterResolver.resolve``.
            UnsupportedParameterError: an option is vLLM's and has no meaning here; gives the remedy.
            ValidationError: an option does not exist.
        """
        unknown = options.keys() - RequestOptions.__annotations__.keys()
        for name in sorted(unknown & _NOT_OURS.keys()):
            raise UnsupportedParameterError(f"{name} is not supported: {_NOT_OURS[name]}")
        if unknown:
            check_argument_names("a request", unknown, ("prompt", "params", *RequestOptions.__annotations__))
        self.check_open()
        model, adapter = options.get("model"), options.get("lora_request")
        name = self._cards.unknown_name(model)
        if name is None and adapter is None:
            return await self._cards.find(model)
        card = await self._resolve(options, name, adapter)
        await self._cards.record_awaited(card.model)
        return card

    async def _resolve(self, options: RequestOptions, name: str | None, adapter: object) -> ModelCard:
        tenant = options.get("tenant") or self.tenant
        record = None if name is None else await self._adapters.named(name, tenant)
        if record is None:
            card = await self._cards.find(options.get("model"))
            if adapter is not None:
                options["lora_request"] = await self._adapters.resolve(adapter, card.model, tenant)
            return card
        if adapter is not None:
            raise ValidationError(
                f"lora_request must be left out because model {shown(name)} is an adapter already; or pass its base as "
                f"the model, {record.model}"
            )
        card = await self._cards.find(record.model)
        options["model"], options["lora_request"] = card.model, record.request()
        return card

    async def build(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> list[Outgoing]:
        """Return the single requests to send, one per answer. Raises: as ``checked_card`` and ``build_request``."""
        make = partial(self.outgoing, prompt, params, options, await self.checked_card(options))
        return await _off_the_loop(make, prompt, options)

    def outgoing(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, card: ModelCard
    ) -> list[Outgoing]:
        """Return the single requests for a model whose card is known, as ``build``."""
        request = build_request(prompt, params, card=card, tenant=self.tenant, options=options)
        each, target = children(request), webhook_target(request, options)
        content = _content(request, params or SamplingParams(), options)
        return [
            Outgoing(child, options, card.max_model_len, target, request.request_id, len(each), content)
            for child in each
        ]

    def pooling(
        self,
        prompt: Prompt | TextPair,
        params: PoolingParams | None,
        options: RequestOptions,
        card: ModelCard,
    ) -> Outgoing:
        """Return the request that pools ``prompt``. Raises: as ``build_pooling_request``."""
        request = build_pooling_request(prompt, params, card=card, tenant=self.tenant, options=options)
        assert request.pooling_params is not None
        target, content = webhook_target(request, options), _content(request, request.pooling_params, options)
        return Outgoing(request, options, card.max_model_len, target, request.request_id, content=content)

    async def build_detached(
        self,
        prompt: Prompt | TextPair,
        params: SamplingParams | PoolingParams | None,
        options: RequestOptions,
    ) -> list[Outgoing]:
        """Return the single requests of a request that generates or pools, by the type of ``params``."""
        make = partial(self.detached, prompt, params, options, await self.checked_card(options))
        return await _off_the_loop(make, prompt, options)

    def detached(
        self,
        prompt: Prompt | TextPair,
        params: SamplingParams | PoolingParams | None,
        options: RequestOptions,
        card: ModelCard,
    ) -> list[Outgoing]:
        """Return the single requests of a detached request for a model whose card is known."""
        if isinstance(params, PoolingParams):
            return [self.pooling(prompt, params, options, card)]
        return self.outgoing(prompt, params, options, card)  # type: ignore[arg-type]  # it refuses pairs

    def check_open(self) -> None:
        """Raise ``ClientClosedError`` unless the client is connected in this process and event loop."""
        self._requests.lifecycle.check()


async def _off_the_loop(
    make: Callable[[], list[Outgoing]], prompt: Prompt | TextPair, options: RequestOptions
) -> list[Outgoing]:
    """Call ``make``, in a thread if ``prompt`` has so many parts that the checks take milliseconds."""
    return await asyncio.to_thread(make) if _num_parts(prompt, options) > MANY_PARTS else make()


def _num_parts(prompt: Prompt | TextPair, options: RequestOptions) -> int:
    """Return the number of messages, message parts and tools, each of which is checked in Python."""
    if isinstance(prompt, str | TextPair):
        return 0
    messages = prompt.get("messages") if isinstance(prompt, Mapping) else prompt
    kwargs = options.get("chat_template_kwargs")
    tools = kwargs.get("tools") if isinstance(kwargs, Mapping) else None
    num_parts = len(tools) if isinstance(tools, Sequence) else 0
    if not isinstance(messages, Sequence) or not messages or not isinstance(messages[0], Mapping):
        return num_parts
    if len(messages) > MANY_PARTS:
        return len(messages)
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    return num_parts + sum(len(content) if isinstance(content, list | tuple) else 1 for content in contents)


def _content(request: EngineCoreRequest, params: SamplingParams | PoolingParams, options: RequestOptions) -> str:
    """Return the content digests of a request with a caller's id; "" if the id was generated."""
    return "" if options.get("request_id") is None else content_of(request, params)
