"""A blocking face for scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, Awaitable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, TypeVar, Unpack

from ..shared.embedded import resolve_redis_url
from ..shared.errors import ValidationError
from ..shared.messages import Delta
from ..shared.params import PoolingParams, SamplingParams
from ..shared.shown import shown
from .client import Client
from .embeds import EmbedsArray
from .llm_control import LLMControl
from .options import RequestOptions
from .outputs import RequestOutput
from .pooling import PoolingRequestOutput
from .progress import ProgressBar
from .prompt import Prompt, params_of_each

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Messages = Sequence[Mapping[str, Any]]
MAX_IN_FLIGHT = 4096


class Closable(Protocol[T_co]):
    """An asynchronous iterator that can be left early."""

    def __anext__(self) -> Awaitable[T_co]: ...

    def aclose(self) -> Awaitable[None]: ...


class LLM(LLMControl):
    """Generate from a list of prompts and wait for all answers; and control engines, queues and models, blocking.

    Args:
        url: Redis URL; ``PENSTOCK_REDIS_URL`` or the embedded Redis when None.
        options: as for ``Client``.

    Use as a context manager, or call ``close()``.
    """

    def __init__(self, url: str | None = None, **options: Any) -> None:
        self._stack = ExitStack()
        url = self._stack.enter_context(resolve_redis_url(url))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-llm", daemon=True)
        self._thread.start()
        self._client = Client(url, **options)
        try:
            self.call(self._client.open())
        except BaseException:
            self._stop()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Return one output per prompt, in order; shows a progress bar on a terminal.

        ``params`` is one for all prompts or one each. ``options`` are those of a request: ``model``, ``band``,
        ``tenant``, ``timeout_s`` and so on, but no ``request_id``, which would be that of all. An error of one request
        is raised after the others ended.

        Raises: as ``Client.stream``.
        """
        if options.get("request_id") is not None:
            raise ValidationError("generate takes no request_id: each request needs its own")
        wanted = _as_list(prompts)
        each = params_of_each(params, len(wanted))
        with ProgressBar(len(wanted), shown=progress) as bar:
            return self.call(self._generate_all(wanted, each, options, bar))

    def stream(
        self,
        prompt: Prompt | AsyncIterable[Prompt],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[Delta]:
        """Generate from ``prompt`` and iterate over the output as it is produced; see ``Client.stream``.

        Closing the iterator early cancels the request. Any number of threads may stream at once, each its own.
        """
        return self.iterate(self._client.stream(prompt, params, **options))

    @property
    def client(self) -> Client:
        """The asynchronous client behind it: what it does, ``call`` and ``iterate`` do for threads that block."""
        return self._client

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of ``client`` to its end: ``llm.call(llm.client.submit(prompt))``. From any thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def iterate(self, items: Closable[T]) -> Generator[T]:
        """Iterate over what an asynchronous generator (or an ``EventStream``) gives; closing the iterator closes it."""
        try:
            while True:
                try:
                    item = self.call(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            closing = asyncio.run_coroutine_threadsafe(_close(items), self._loop)
            # The loop's own thread gets here if it collects a forgotten iterator: it must not wait for itself.
            if threading.current_thread() is not self._thread:
                closing.result()

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """``generate`` for one conversation, or for many at once: lists of ``{"role": ..., "content": ...}``.

        What the model's chat template takes beside messages goes into ``chat_template_kwargs``: ``tools``,
        ``add_generation_prompt``, ``enable_thinking`` and so on.

        Raises:
            ValidationError: what is given is no conversation.
            and as ``generate``.
        """
        return self.generate(_as_conversations(messages), params, progress=progress, **options)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        *,
        progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[PoolingRequestOutput]:
        """Embed, classify or score each prompt. No engine of this version does; see ``Client.encode``."""
        wanted = _as_list(prompts)
        with ProgressBar(len(wanted), shown=progress) as bar:
            return self.call(self._encode_all(wanted, params, options, bar))

    def close(self) -> None:
        """Disconnect; twice does nothing."""
        if self._thread.is_alive():
            self.call(self._client.close())
            self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _encode_all(
        self, prompts: list[Prompt], params: PoolingParams | None, options: RequestOptions, bar: ProgressBar
    ) -> list[PoolingRequestOutput]:
        outputs = []
        for prompt in prompts:
            outputs.append(await self._client.encode(prompt, params, **options))
            bar.advance(0)
        return outputs

    async def _generate_all(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams | None],
        options: RequestOptions,
        bar: ProgressBar,
    ) -> list[RequestOutput]:
        most_answers = max((chosen.n for chosen in params if isinstance(chosen, SamplingParams)), default=1)
        in_flight = asyncio.Semaphore(MAX_IN_FLIGHT // most_answers)

        async def one(prompt: Prompt, chosen: SamplingParams | None) -> RequestOutput:
            async with in_flight:
                output = await self._client.generate(prompt, chosen, **options)
            bar.advance(sum(len(answer.token_ids) for answer in output.outputs))
            return output

        pairs = zip(prompts, params, strict=True)
        results = await asyncio.gather(*(one(p, c) for p, c in pairs), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]  # no exception is left in it

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._stack.close()


async def _next(items: Closable[T]) -> T:
    return await items.__anext__()


async def _close(items: Closable[Any]) -> None:
    await items.aclose()


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt of any form, or a list of such, as a list."""
    if isinstance(prompts, str | EmbedsArray):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int | dict):
        return [prompts]
    return list(prompts)


def _as_conversations(messages: Any) -> list[Prompt]:
    """One conversation or many, as a list."""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        if messages and all(isinstance(message, Mapping) for message in messages):
            return [messages]
        for position, conversation in enumerate(messages):
            is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
            if not (is_list and conversation and all(isinstance(message, Mapping) for message in conversation)):
                raise ValidationError(
                    f"messages[{position}] must be a conversation, a list of messages, got {shown(conversation)}"
                )
        return list(messages)
    raise ValidationError(f"messages must be a conversation or a list of them, got {shown(messages)}")
