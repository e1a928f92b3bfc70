"""The client's view of the models that are served, and its calls to their tokenizers, which run in the workers."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ...shared.control.calls import Utility
from ...shared.control.model import Detokenize, DetokenizedText, GetTokenizer, Tokenize, TokenizedText, TokenizerFile
from ...shared.deployment.records import ModelCard
from ...shared.errors import ConfigurationError, EngineCallError, EngineDeadError, EngineNotFoundError
from ...shared.params.chat import check_messages
from ...shared.params.lora import LoRARequest
from ..client_parts.core import CallOptions, ClientCore
from ..inputs.options import RequestOptions, template_kwargs_of
from ..requests.health import DEAF_STATES
from .engine_view import EngineView

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT_TIMEOUT_S = 10.0
FILE_TIMEOUT_S = 60.0
A = TypeVar("A")


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


class TextControl(EngineView):
    """The part of the client for text. Any engine of the model answers, including a sleeping one that has a core.

    All methods raise:
        ValidationError: an argument is wrong, or the chat template refuses the messages.
        UnknownModelError: no worker has ever served ``model`` here.
        EngineDeadError: no engine of the model can answer.
        EngineTimeoutError: no engine answered within ``timeout_s``.
    """

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        add_special_tokens: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        has_pieces: bool = False,
        timeout_s: float = TEXT_TIMEOUT_S,
    ) -> TokenizedText:
        """Return the token ids of a text or of chat messages, as a request with that prompt would have them.

        Args:
            add_special_tokens: whether to add the tokens that the model expects around a text; the chat template adds
                its own.
            has_pieces: also return the bytes of each token.
        """
        if isinstance(prompt, str):
            call = Tokenize(prompt=prompt, add_special_tokens=add_special_tokens, has_pieces=has_pieces)
        else:
            kwargs, messages = template_kwargs_of(chat_template_kwargs), check_messages(prompt)
            call = Tokenize(messages=messages, chat_template_kwargs=kwargs, has_pieces=has_pieces)
        return await self._ask_one(call, TokenizedText, model, timeout_s)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, timeout_s: float = TEXT_TIMEOUT_S
    ) -> str:
        """Return the text of ``token_ids``, special tokens included."""
        call = Detokenize(token_ids=list(token_ids))
        return (await self._ask_one(call, DetokenizedText, model, timeout_s)).text

    async def get_tokenizer(self, model: str | None = None, *, timeout_s: float = FILE_TIMEOUT_S) -> Tokenizer:
        """Fetch the model's tokenizer from an engine, to tokenize many texts without a call for each.

        Needs the package ``tokenizers``, which the client does not install. The file may have some MB: keep the result.

        Raises:
            ConfigurationError: ``tokenizers`` is not installed.
        """
        await asyncio.to_thread(_require_tokenizers)
        file = await self._ask_one(GetTokenizer(), TokenizerFile, model, timeout_s)
        return await asyncio.to_thread(_read_tokenizer, file)

    async def _ask_one(self, call: Utility, kind: type[A], model: str | None, timeout_s: float) -> A:
        """Call one engine after another until one answers."""
        last_error: Exception | None = None
        for engine in await self.engines(model):
            if engine.state in DEAF_STATES:
                continue
            options = CallOptions(engine_id=engine.engine_id, model=engine.model, timeout_s=timeout_s)
            try:
                (answer,) = (await self._call_engines(call, kind, options)).values()
                return answer
            except (EngineDeadError, EngineNotFoundError) as error:
                last_error = error
            except EngineCallError as error:
                (cause,) = error.errors.values()
                if not isinstance(cause, EngineDeadError):
                    raise cause from error
                last_error = cause
        raise EngineDeadError(f"no engine of the model can be called: {last_error or 'none has a heartbeat'}")


def _require_tokenizers() -> None:
    """Check that ``tokenizers`` can be imported, before anything is fetched. Blocks, since an import reads files."""
    try:
        import tokenizers  # noqa: F401  # only checks that it can be imported
    except ImportError:
        raise ConfigurationError("get_tokenizer needs the package tokenizers: pip install tokenizers") from None


def _read_tokenizer(file: TokenizerFile) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(zlib.decompress(file.data))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
