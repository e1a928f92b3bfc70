"""What a client can know of the models that are served."""

from __future__ import annotations

from ...shared.deployment.records import ModelCard
from ...shared.params.lora import LoRARequest
from ..client_core import ClientCore
from ..inputs.options import RequestOptions


class ModelView(ClientCore):
    """The part of the client that looks at models. ``model`` may be left out as for a request.

    All methods raise ``UnknownModelError`` if no worker has ever served ``model`` here.
    """

    async def models(self) -> dict[str, ModelCard]:
        """Return the models that workers have served on this Redis, by name."""
        return await self._builder.fresh_cards()

    async def find_model(
        self, model: str | None = None, *, tenant: str | None = None
    ) -> tuple[str, LoRARequest | None]:
        """Return the model that a name means to a tenant, and the adapter if it is that of one, as it is now."""
        options = RequestOptions(model=model, tenant=tenant)
        card = await self._builder.checked_card(options)
        adapter = options.get("lora_request")
        return card.model, adapter if isinstance(adapter, LoRARequest) else None

    async def forget_model(self, model: str) -> None:
        """Take a model off the list that nobody serves any more. A worker that serves it again brings it back.

        Raises:
            ValidationError: an engine serves it, or requests of it wait, run or are parked.
        """
        await self._builder.forget(model)

    async def get_model_config(self, model: str | None = None) -> ModelCard:
        """Return what the model's workers have said of it when they last began: its length, vocabulary, dtype, ..."""
        name = (await self._builder.card(model)).model
        cards = await self._builder.fresh_cards()
        return cards.get(name) or await self._builder.card(name)

    async def get_supported_tasks(self, model: str | None = None) -> tuple[str, ...]:
        """Return what requests of the model may ask for: ("generate",) in this version."""
        return (await self.get_model_config(model)).supported_tasks

    async def is_tracing_enabled(self, model: str | None = None) -> bool:
        """Return whether the worker that last began to serve the model makes spans of requests."""
        return (await self.get_model_config(model)).is_tracing_enabled
