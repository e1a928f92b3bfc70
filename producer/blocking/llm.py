"""The blocking client, for scripts and notebooks, on a deployment or with an engine of its own."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Awaitable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, Unpack, overload

from ...shared.errors import (
    ClientClosedError,
    ConfigurationError,
    EngineDeadError,
    UnknownArgumentError,
    ValidationError,
)
from ...shared.messages.deltas import Delta
from ...shared.params.pooling import PoolingParams
from ...shared.params.sampling import SamplingParams
from ...shared.process.secret_files import variable_or_file
from ...shared.redis_access.embedded import REDIS_URL_VARIABLE, resolve_redis_url
from ...shared.values.arguments import check_argument_names
from ...shared.values.shown import shown
from ..client import Client, ClientOptions
from ..inputs.options import RequestOptions, options_of_each
from ..inputs.prompt import Prompt, as_prompts, params_of_each
from ..inputs.prompt_lists import as_conversations, naming, numbered
from ..inputs.streaming_input import GrowingPrompt
from ..results import (
    ClassificationRequestOutput,
    DataPrompt,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ProcessedRequestOutput,
    RequestOutput,
    TextPair,
)
from .loop_thread import LoopThread, warn_in_event_loop
from .own_engine import OwnEngine
from .progress import PromptProgress, UseTqdm
from .stepping import SteppedLLM

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Messages = Sequence[Mapping[str, Any]]
MAX_IN_FLIGHT = 4096
_parents_connections: list[object] = []


class Closable(Protocol[T_co]):
    """An asynchronous iterator that can be closed early."""

    def __anext__(self) -> Awaitable[T_co]: ...

    def aclose(self) -> Awaitable[None]: ...


class LLM(SteppedLLM):
    """Generate from a list of prompts and wait for all answers; and control engines, queues and models, blocking.

    With ``model`` and no URL it starts an engine for this program, with a private Redis: both end with ``close()``, or
    with the program, however that ends. Otherwise it connects to a deployment.

    Args:
        url: Redis URL; ``PENSTOCK_REDIS_URL`` when None; without both ``model`` is started, or without ``model`` the
            embedded Redis is used.
        model: folder, GGUF file or hub name to start; on a deployment the default model, as for ``Client``.
        options: as for ``Client``; for an engine of its own also the options of ``worker start``, by their names in
            Python: ``max_model_len=4096``.

    Raises:
        ConfigurationError: the engine does not start; the message has the reason, and the log after it.

    Use it as a context manager, or call ``close()``. Any thread may use it. A process that is forked meanwhile, as by
    ``gunicorn --preload``, may use it too: the child connects anew, but iterators of the parent stay the parent's.
    """

    _connected: tuple[LoopThread, Client] | None = None
    # True until it is open: nothing needs closing before.
    _is_closed = True

    @overload
    def __init__(self, url: str | None = None, **options: Unpack[ClientOptions]) -> None: ...

    @overload
    def __init__(self, *, model: str | Path, **options: Any) -> None: ...

    def __init__(self, url: str | None = None, *, model: str | Path | None = None, **options: Any) -> None:
        warn_in_event_loop()
        if url is not None and "://" not in str(url):
            raise ConfigurationError(
                f"{shown(url)} is not a Redis URL; LLM(model={shown(url)}) starts an engine for this program"
            )
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._death: EngineDeadError | None = None
        try:
            if url is None and model is not None and not variable_or_file(REDIS_URL_VARIABLE):
                self._url, self._options = self._start_engine(model, options)
            else:
                _check_deployment_options(options)
                self._url = self._stack.enter_context(resolve_redis_url(url))
                self._options = ClientOptions(model=None if model is None else str(model), **options)
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
        use_tqdm: UseTqdm = True,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Return one output per prompt, in order.

        ``use_tqdm`` shows a progress bar on a terminal or in a notebook; a class with tqdm's interface replaces it.

        ``params`` is one for all prompts or one each. ``options`` are those of a request: ``model``, ``band``,
        ``tenant``, ``timeout_s`` and so on, but no ``request_id``, which all requests would share; ``lora_request`` is
        one or one each. An error of one request is raised after the others have ended.

        Raises: as ``Client.stream``.
        """
        if options.get("request_id") is not None:
            raise ValidationError("generate takes no request_id: each request needs its own")
        prompt_list = as_prompts(prompts)
        each = params_of_each(params, len(prompt_list))
        with PromptProgress(len(prompt_list), use_tqdm) as bar:
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
            EngineDeadError: the engine that this object started has ended for good.
        """
        warn_in_event_loop()
        try:
            thread, _ = self._own_connection()
        except BaseException:
            work.close()
            raise
        with self._naming_death():
            return thread.run(work)

    def iterate(self, items: Closable[T]) -> Generator[T]:
        """Iterate over the items of an asynchronous generator or an ``EventStream``; closing the iterator closes it."""
        warn_in_event_loop()
        thread, _ = self._own_connection()
        try:
            while True:
                try:
                    with self._naming_death():
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
        use_tqdm: UseTqdm = True,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """``generate`` for one conversation, or for many: lists of ``{"role": ..., "content": ...}``.

        Arguments of the model's chat template besides messages go into ``chat_template_kwargs``: ``tools``,
        ``add_generation_prompt``, ``enable_thinking`` and so on.

        Raises:
            ValidationError: ``messages`` are not conversations.
            PenstockError: any error of ``generate``.
        """
        return self.generate(as_conversations(messages), params, use_tqdm=use_tqdm, **options)

    @overload
    def encode(
        self,
        prompts: DataPrompt,
        params: PoolingParams | None = None,
        *,
        use_tqdm: UseTqdm = True,
        **options: Unpack[RequestOptions],
    ) -> list[ProcessedRequestOutput]: ...

    @overload
    def encode(
        self,
        prompts: Prompt | TextPair | Sequence[Prompt | TextPair],
        params: PoolingParams | None = None,
        *,
        use_tqdm: UseTqdm = True,
        **options: Unpack[RequestOptions],
    ) -> list[PoolingRequestOutput]: ...

    def encode(
        self,
        prompts: DataPrompt | Prompt | TextPair | Sequence[Prompt | TextPair],
        params: PoolingParams | None = None,
        *,
        use_tqdm: UseTqdm = True,
        **options: Unpack[RequestOptions],
    ) -> list[ProcessedRequestOutput] | list[PoolingRequestOutput]:
        """Embed or classify each prompt, as ``params.task`` says; see ``Client.encode_all``.

        A ``DataPrompt`` has a single output, which an I/O processor creates.
        """
        if isinstance(prompts, DataPrompt):
            return [self.call(self._client.encode(prompts, params, **options))]
        prompt_list = as_prompts(prompts)
        with PromptProgress(len(prompt_list), use_tqdm) as bar:
            return self.call(self._client.encode_all(prompt_list, params, on_output=bar.advance, **options))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        *,
        use_tqdm: UseTqdm = True,
        **options: Unpack[RequestOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Embed one prompt or many, with a progress bar; see ``Client.embed``."""
        prompt_list = as_prompts(prompts)
        with PromptProgress(len(prompt_list), use_tqdm) as bar:
            return self.call(self._client.embed(prompt_list, params, on_output=bar.advance, **options))

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        *,
        use_tqdm: UseTqdm = True,
        **options: Unpack[RequestOptions],
    ) -> list[ClassificationRequestOutput]:
        """Classify one prompt or many, with a progress bar; see ``Client.classify``."""
        prompt_list = as_prompts(prompts)
        with PromptProgress(len(prompt_list), use_tqdm) as bar:
            return self.call(self._client.classify(prompt_list, params, on_output=bar.advance, **options))

    def close(self) -> None:
        """Disconnect, and end an engine that this object started. Closing twice does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._connected is not None:
                thread, client = self._connected
                thread.cancel_work()
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
        bar: PromptProgress,
    ) -> list[RequestOutput]:
        max_answers = max((each.n for each in params if isinstance(each, SamplingParams)), default=1)
        in_flight = asyncio.Semaphore(MAX_IN_FLIGHT // max_answers)

        async def generate_one(
            name: str, prompt: Prompt, prompt_params: SamplingParams | None, prompt_options: RequestOptions
        ) -> RequestOutput:
            with naming(name):
                async with in_flight:
                    output = await self._client.generate(prompt, prompt_params, **prompt_options)
            bar.advance_by(output)
            return output

        arguments = zip(numbered("prompt", prompts), prompts, params, options, strict=True)
        results = await asyncio.gather(*(generate_one(*each) for each in arguments), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]  # contains no exception here

    def _start_engine(self, model: str | Path, options: dict[str, Any]) -> tuple[str, ClientOptions]:
        """Start an engine for this program. Return the URL of its Redis and the options of a client of it."""
        for name in ("namespace", "shards"):
            if name in options:
                raise ValidationError(f"{name} belongs to a deployment; give its url, or leave {name} out")
        names = ClientOptions.__annotations__
        of_engine = {"drain_timeout": 0} | {name: value for name, value in options.items() if name not in names}
        if (endpoint := options.get("otlp_traces_endpoint")) is not None:
            of_engine["otlp_traces_endpoint"] = endpoint
        engine = OwnEngine(model, of_engine, self._on_engine_death)
        self._stack.callback(engine.end)
        of_client = {name: value for name, value in options.items() if name in names}
        return engine.url, ClientOptions(**of_client, shards={})

    def _on_engine_death(self, error: EngineDeadError) -> None:
        """End all calls, since the engine of this program does not come back."""
        self._death = error
        self.close()

    @contextmanager
    def _naming_death(self) -> Iterator[None]:
        """Raise the death of the engine that this object started in place of an end of the connection."""
        try:
            yield
        except ClientClosedError:
            if self._death is None:
                raise
            raise self._death from None

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
                if self._death is not None:
                    raise self._death
                raise ClientClosedError("the LLM was closed; create another, or use it inside `with LLM(url) as llm:`")
            return self._connected or self._connect()

    def _drop_parents_connection(self) -> None:
        """In a forked child: leave loop and client to the parent, and connect anew at the next call."""
        # Another thread of the parent may have held the lock.
        self._lock = threading.Lock()
        # Referenced for ever, since closing the connections would end those that the parent shares.
        _parents_connections.append(self._connected)
        self._connected = None


def _check_deployment_options(options: dict[str, Any]) -> None:
    """Check the names of options for a deployment, whose engines have theirs from ``worker start``."""
    try:
        check_argument_names("LLM", options, ("url", *ClientOptions.__annotations__))
    except UnknownArgumentError as error:
        if "did you mean" in str(error):
            raise
        raise UnknownArgumentError(
            f"{error}. An option of an engine goes to `worker start`, or to LLM(model=...) where neither url nor "
            f"{REDIS_URL_VARIABLE} names a deployment"
        ) from None


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
