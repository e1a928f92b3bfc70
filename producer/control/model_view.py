"""The client's view of the models that are served."""

from __future__ import annotations

from ...shared.deployment.records import ModelCard
from ...shared.params.lora import LoRARequest
from ..client_core import ClientCore
from ..inputs.options import RequestOptions


class ModelView(ClientCore):
    """The part of the client that reads the model cards. ``model`` may be left out as for a request.

    All methods raise ``UnknownModelError`` if no worker has ever served ``model`` here.
    """

    async def models(self) -> dict[str, ModelCard]:
        """Return the models that workers have served on this Redis, by name."""
        return await self._builder.fresh_cards()

    async def find_model(
        self, model: str | None = None, *, tenant: str | None = None
    ) -> tuple[str, LoRARequest | None]:
        """Return the model that a name currently means to a tenant, and the adapter if the name is an adapter's."""
        options = RequestOptions(model=model, tenant=tenant)
        card = await self._builder.checked_card(options)
        adapter = options.get("lora_request")
        return card.model, adapter if isinstance(adapter, LoRARequest) else None

    async def forget_model(self, model: str) -> None:
        """Remove a model that no engine serves from the list of models. A worker that serves it again adds it again.

        Raises:
            ValidationError: an engine serves it, or requests for it wait, run or are parked.
        """
        await self._builder.forget(model)

    async def get_model_config(self, model: str | None = None) -> ModelCard:
        """Return the model's card, which its workers wrote at their last start: its length, vocabulary, dtype and so
        on.
        """
        name = (await self._builder.card(model)).model
        cards = await self._builder.fresh_cards()
        return cards.get(name) or await self._builder.card(name)

    async def get_supported_tasks(self, model: str | None = None) -> tuple[str, ...]:
        """Return the tasks that the model supports: "generate", or those of a pooling model."""
        return (await self.get_model_config(model)).supported_tasks

    async def is_tracing_enabled(self, model: str | None = None) -> bool:
        """Return whether the worker that started last for the model creates spans of requests."""
        return (await self.get_model_config(model)).is_tracing_enabled
