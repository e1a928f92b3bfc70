"""The blocking client, for scripts and notebooks, and its progress bar on standard error."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Protocol, TypeVar, Unpack, overload

from ...shared.errors import ClientClosedError, ValidationError
from ...shared.messages.deltas import Delta
from ...shared.params.pooling import PoolingParams
from ...shared.params.sampling import SamplingParams
from ...shared.redis_access.embedded import resolve_redis_url
from ...shared.values.arguments import check_argument_names
from ..client import Client, ClientOptions
from ..inputs.options import RequestOptions, options_of_each
from ..inputs.prompt import Prompt, as_prompts, params_of_each
from ..inputs.prompt_lists import as_conversations, naming, numbered
from ..inputs.streaming_input import GrowingPrompt
from ..results import DataPrompt, PoolingRequestOutput, ProcessedRequestOutput, RequestOutput, TextPair
from .loop_thread import LoopThread, warn_in_event_loop
from .stepping import SteppedLLM

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Messages = Sequence[Mapping[str, Any]]
MAX_IN_FLIGHT = 4096
_parents_connections: list[object] = []
WIDTH = 30
REDRAW_S = 0.1


class Closable(Protocol[T_co]):
    """An asynchronous iterator that can be closed early."""

    def __anext__(self) -> Awaitable[T_co]: ...

    def aclose(self) -> Awaitable[None]: ...


class LLM(SteppedLLM):
    """Generate from a list of prompts and wait for all answers; and control engines, queues and models, blocking.

    Args:
        url: Redis URL; ``PENSTOCK_REDIS_URL`` or the embedded Redis when None.
        options: as for ``Client``.

    Use it as a context manager, or call ``close()``. Any thread may use it. A process that is forked meanwhile, as by
    ``gunicorn --preload``, may use it too: the child connects anew, but iterators of the parent stay the parent's.
    """

    _connected: tuple[LoopThread, Client] | None = None
    # True until it is open: nothing needs closing before.
    _is_closed = True

    def __init__(self, url: str | None = None, **options: Unpack[ClientOptions]) -> None:
        check_argument_names("LLM", options, ("url", *ClientOptions.__annotations__))
        warn_in_event_loop()
        self._stack = ExitStack()
        self._url = self._stack.enter_context(resolve_redis_url(url))
        self._options = options
        self._lock = threading.Lock()
        try:
            self._connect()
        except BaseException:
            self._stack.close()
            raise
        self._is_closed = False
        _llms.add(self)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Return one output per prompt, in order. Shows a progress bar on a terminal.

        ``params`` is one for all prompts or one each. ``options`` are those of a request: ``model``, ``band``,
        ``tenant``, ``timeout_s`` and so on, but no ``request_id``, which all requests would share; ``lora_request`` is
        one or one each. An error of one request is raised after the others have ended.

        Raises: as ``Client.stream``.
        """
        if options.get("request_id") is not None:
            raise ValidationError("generate takes no request_id: each request needs its own")
        prompt_list = as_prompts(prompts)
        each = params_of_each(params, len(prompt_list))
        with ProgressBar(len(prompt_list), shown=progress) as bar:
            return self.call(self._generate_all(prompt_list, each, options_of_each(options, len(prompt_list)), bar))

    def stream(
        self,
        prompt: Prompt | GrowingPrompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[Delta]:
        """Generate from ``prompt`` and iterate over the output as it is produced; see ``Client.stream``.

        Closing the iterator early cancels the request. Any number of threads may stream concurrently, each its own
        request.
        """
        return self.iterate(self._client.stream(prompt, params, **options))

    @property
    def client(self) -> Client:
        """The asynchronous client of this object; ``call`` and ``iterate`` use it from threads that block."""
        return self._own_connection()[1]

    @property
    def _client(self) -> Client:
        return self.client

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of ``client`` to its end: ``llm.call(llm.client.submit(prompt))``. From any thread.

        Raises:
            ClientClosedError: after ``close()``.
        """
        warn_in_event_loop()
        try:
            thread, _ = self._own_connection()
        except BaseException:
            work.close()
            raise
        return thread.run(work)

    def iterate(self, items: Closable[T]) -> Generator[T]:
        """Iterate over the items of an asynchronous generator or an ``EventStream``; closing the iterator closes it."""
        warn_in_event_loop()
        thread, _ = self._own_connection()
        try:
            while True:
                try:
                    item = thread.run(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            # Also runs in the loop's own thread, if that collects an abandoned iterator.
            thread.clean_up(_close_items(items))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """``generate`` for one conversation, or for many: lists of ``{"role": ..., "content": ...}``.

        Arguments of the model's chat template besides messages go into ``chat_template_kwargs``: ``tools``,
        ``add_generation_prompt``, ``enable_thinking`` and so on.

        Raises:
            ValidationError: ``messages`` are not conversations.
            PenstockError: any error of ``generate``.
        """
        return self.generate(as_conversations(messages), params, progress=progress, **options)

    @overload
    def encode(
        self,
        prompts: DataPrompt,
        params: PoolingParams | None = None,
        *,
        progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[ProcessedRequestOutput]: ...

    @overload
    def encode(
        self,
        prompts: Prompt | TextPair | Sequence[Prompt | TextPair],
        params: PoolingParams | None = None,
        *,
        progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[PoolingRequestOutput]: ...

    def encode(
        self,
        prompts: DataPrompt | Prompt | TextPair | Sequence[Prompt | TextPair],
        params: PoolingParams | None = None,
        *,
        progress: bool = True,
        **options: Unpack[RequestOptions],
    ) -> list[ProcessedRequestOutput] | list[PoolingRequestOutput]:
        """Embed or classify each prompt, as ``params.task`` says; see ``Client.encode_all``.

        A ``DataPrompt`` has a single output, which an I/O processor creates.
        """
        if isinstance(prompts, DataPrompt):
            return [self.call(self._client.encode(prompts, params, **options))]
        prompt_list = as_prompts(prompts)
        with ProgressBar(len(prompt_list), shown=progress) as bar:
            return self.call(self._client.encode_all(prompt_list, params, on_output=lambda: bar.advance(0), **options))

    def close(self) -> None:
        """Disconnect. Closing twice does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._connected is not None:
                thread, client = self._connected
                if (stepped := self._own_process_requests(client)) is not None:
                    thread.run(stepped.leave())
                thread.run(client.close())
                thread.stop()
            self._stack.close()

    def __del__(self) -> None:
        """Close an LLM that was left open, so that an embedded Redis stops with its last user."""
        with suppress(Exception):
            if self._connected is not None and self._connected[0].is_current_thread:
                # The loop's own thread runs the garbage collection, and must not wait for itself.
                threading.Thread(target=self.close, daemon=True).start()
            else:
                self.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _generate_all(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams | None],
        options: Sequence[RequestOptions],
        bar: ProgressBar,
    ) -> list[RequestOutput]:
        max_answers = max((each.n for each in params if isinstance(each, SamplingParams)), default=1)
        in_flight = asyncio.Semaphore(MAX_IN_FLIGHT // max_answers)

        async def generate_one(
            name: str, prompt: Prompt, prompt_params: SamplingParams | None, prompt_options: RequestOptions
        ) -> RequestOutput:
            with naming(name):
                async with in_flight:
                    output = await self._client.generate(prompt, prompt_params, **prompt_options)
            bar.advance(sum(len(answer.token_ids) for answer in output.outputs))
            return output

        arguments = zip(numbered("prompt", prompts), prompts, params, options, strict=True)
        results = await asyncio.gather(*(generate_one(*each) for each in arguments), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]  # contains no exception here

    def _connect(self) -> tuple[LoopThread, Client]:
        thread, client = LoopThread(), Client(self._url, **self._options)
        try:
            thread.run(client.open())
        except BaseException:
            thread.stop()
            raise
        self._connected = thread, client
        return self._connected

    def _own_connection(self) -> tuple[LoopThread, Client]:
        """Return the loop and the client of this process; after a fork, create new ones."""
        if self._connected is not None and not self._is_closed:
            return self._connected
        with self._lock:
            if self._is_closed:
                raise ClientClosedError("the LLM was closed; create another, or use it inside `with LLM(url) as llm:`")
            return self._connected or self._connect()

    def _drop_parents_connection(self) -> None:
        """In a forked child: leave loop and client to the parent, and connect anew at the next call."""
        # Another thread of the parent may have held the lock.
        self._lock = threading.Lock()
        # Referenced for ever, since closing the connections would end those that the parent shares.
        _parents_connections.append(self._connected)
        self._connected = None


_llms: weakref.WeakSet[LLM] = weakref.WeakSet()


def _drop_parents_connection() -> None:
    for llm in _llms:
        llm._drop_parents_connection()


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_parents_connection)


def _close_all() -> None:
    """Close the LLMs that a script left open, while its interpreter can still import and its loop threads run."""
    for llm in list(_llms):
        # An error here would be printed after the error that ends the script.
        with suppress(Exception):
            llm.close()


atexit.register(_close_all)


async def _next(items: Closable[T]) -> T:
    return await items.__anext__()


async def _close_items(items: Closable[Any]) -> None:
    await items.aclose()


class ProgressBar:
    """Counts finished requests and their tokens. Draws only on a terminal."""

    def __init__(self, total: int, *, shown: bool = True) -> None:
        self._total = total
        self._shown = shown and total > 0 and sys.stderr.isatty()
        self._done = 0
        self._tokens = 0
        self._started = time.monotonic()
        self._drawn = 0.0

    def advance(self, num_tokens: int) -> None:
        """Count one more finished request and its output tokens."""
        self._done += 1
        self._tokens += num_tokens
        now = time.monotonic()
        if self._shown and (now - self._drawn > REDRAW_S or self._done == self._total):
            self._drawn = now
            self._draw(now - self._started)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._done:
            sys.stderr.write("\n")

    def _draw(self, elapsed_s: float) -> None:
        filled = WIDTH * self._done // self._total
        rate = self._tokens / elapsed_s if elapsed_s else 0.0
        bar = "█" * filled + "·" * (WIDTH - filled)
        sys.stderr.write(f"\r{bar} {self._done}/{self._total} requests, {rate:,.0f} tokens/s ")
        sys.stderr.flush()
