"""I/O processors: convert other kinds of data to prompts for a pooling model, and its results to answers.

An operator names them, and requests select them by name. Their exceptions become errors of the request.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec

from ..shared.errors import ConfigurationError, PenstockError, RequestFailedError, UnsupportedParameterError
from ..shared.errors import ValidationError as WrongData
from ..shared.params.pooling import PoolingParams
from ..shared.process.boundary import ends_task, message_of
from ..shared.process.log import get_logger
from ..shared.process.plugins import IO_PROCESSORS, load_object
from ..shared.values.shown import shown
from .background.concurrency import LongWork, in_long_thread
from .inputs.prompt import as_prompts
from .results import PoolingRequestOutput

PROCESSOR_FAILED = "io_processor_failed"
log = get_logger(__name__)


class IOProcessor(ABC):
    """Converts a request's data to prompts, and their pooled outputs to the answer.

    Each process that names it creates one instance, without arguments, for all requests. Every method but
    ``output_to_response`` and ``merge_pooling_params`` may be ``async def``. Other methods run in threads, possibly
    concurrently, so they must guard state that they change.

    Attributes:
        name: the name by which requests select it.

    Raises: any exception, which ends only its request. A ``ValueError`` of ``parse_request`` or ``pre_process`` means
    invalid data, and its message is returned to the caller. Any other exception is a failure of the processor.
    """

    name: ClassVar[str]

    def parse_request(self, data: Any) -> Any:
        """Return the argument of ``pre_process`` for ``data``: plain data over HTTP, any object from Python."""
        return data

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams | None:
        """Return the parameters of all prompts, given those of the request."""
        return params

    @abstractmethod
    def pre_process(self, prompt: Any, request_id: str | None = None) -> Any:
        """Return one prompt, or a sequence of prompts, as ``Client.encode`` accepts them.

        A repeated call with the same ``request_id`` attaches to the requests of the first call by number, so the same
        data should give the same prompts.
        """

    @abstractmethod
    def post_process(self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None) -> Any:
        """Return the answer, given the output of each prompt in order."""

    def output_to_response(self, output: Any) -> Any:
        """Return an answer in its form for HTTP: plain data, or a struct or dataclass of it."""
        return output


class NamedProcessor:
    """A processor, called for requests.

    Raises, each method:
        ValidationError: the processor refused the data, or Penstock its prompts.
        RequestFailedError: it raised another exception, or returned an unusable value; ``code`` is
            "io_processor_failed".
    """

    def __init__(self, processor: IOProcessor) -> None:
        self.name = processor.name
        self._processor = processor

    async def prompts(self, data: Any, request_id: str) -> list[Any]:
        """Return the prompts for ``data``, at least one."""
        parsed = await self._call_async("parse_request", data)
        result = await self._call_async("pre_process", parsed, request_id=request_id)
        if not isinstance(result, str | bytes) and (result is None or not hasattr(result, "__len__")):
            raise self._failed(
                f"returned {shown(result)} from pre_process, which is neither a prompt nor a list of them"
            )
        prompts = as_prompts(result)
        if not prompts:
            raise self._failed("returned no prompt from pre_process")
        return prompts

    def params(self, params: PoolingParams | None) -> PoolingParams | None:
        """Return the parameters of the prompts."""
        merged = self._call_method("merge_pooling_params", lambda: self._processor.merge_pooling_params(params))
        if not isinstance(merged, PoolingParams | None):
            raise self._failed(f"returned {shown(merged)} from merge_pooling_params, which is not a PoolingParams")
        return merged

    async def answer(self, outputs: list[PoolingRequestOutput], request_id: str) -> Any:
        """Return the answer for the outputs of the prompts."""
        return await self._call_async("post_process", outputs, request_id=request_id)

    def response(self, output: Any) -> msgspec.Raw:
        """Return ``output`` as JSON."""
        response = self._call_method("output_to_response", lambda: self._processor.output_to_response(output))
        try:
            return msgspec.Raw(msgspec.json.encode(response))
        except Exception as error:  # also for invalid strings and circular references
            raise self._failed(f"returned an answer that cannot be encoded as JSON: {error}") from error

    async def _call_async(self, method: str, argument: Any, **named: Any) -> Any:
        """Return the result of a method, which may be async. Raises as all methods do."""
        function = getattr(self._processor, method)
        if not inspect.iscoroutinefunction(function):
            call = partial(function, argument, **named)
            return await in_long_thread(LongWork.IO_PROCESSORS, self._call_method, method, call)
        try:
            return await function(argument, **named)
        except BaseException as error:  # whatever its code raises
            if ends_task(error):
                raise
            raise self._error_of(method, error) from error

    def _call_method(self, method: str, call: Callable[[], Any]) -> Any:
        """Return the result of a method. Errors are converted here, since a StopIteration cannot leave a thread."""
        try:
            return call()
        except BaseException as error:  # any exception of its code; nothing is awaited here, so none is a cancellation
            raise self._error_of(method, error) from error

    def _error_of(self, method: str, error: BaseException) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, ValueError) and method in ("parse_request", "pre_process"):
            return WrongData(f"data was refused by I/O processor {shown(self.name)}: {message_of(error)}")
        log.error("io_processor_failed", io_processor=self.name, method=method, exc_info=error)
        return self._failed(f"raised {type(error).__name__} in {method}: {message_of(error)}")

    def _failed(self, reason: str) -> RequestFailedError:
        return RequestFailedError(f"I/O processor {shown(self.name)} {reason}", code=PROCESSOR_FAILED)


class IOProcessors:
    """The I/O processors that an operator or an app has named.

    Args:
        processors: entry points of the group ``penstock.io_processors``, ``MODULE:CLASS``, or instances.

    Raises:
        ConfigurationError: one cannot be loaded or created, is not a processor, or has the name of another.
    """

    def __init__(self, processors: Iterable[str | IOProcessor] = ()) -> None:
        if isinstance(processors, str):
            raise ConfigurationError(
                f"io_processors must be a list of names, got {shown(processors)}; pass [{shown(processors)}]"
            )
        self._named: dict[str, NamedProcessor] = {}
        for item in processors:
            processor = _load_processor(item) if isinstance(item, str) else item
            _check_processor(processor, item)
            if processor.name in self._named:
                raise ConfigurationError(f"two I/O processors are called {shown(processor.name)}; name one of them")
            self._named[processor.name] = NamedProcessor(processor)

    def find(self, name: str | None) -> NamedProcessor:
        """Return the processor with this name, or the only one if ``name`` is None.

        Raises:
            UnsupportedParameterError: no processor has that name, or there is none.
            ValidationError: there are several, and no name was passed.
        """
        if not self._named:
            raise UnsupportedParameterError(
                "data needs an I/O processor, and none is configured: start the gateway with --io-processor NAME, or "
                "pass io_processors=[NAME] to the client"
            )
        names = ", ".join(self._named)
        if name is None:
            if len(self._named) > 1:
                raise WrongData(f"io_processor must name one of {names}, since there are several")
            (name,) = self._named
        if not isinstance(name, str) or name not in self._named:
            raise UnsupportedParameterError(f"io_processor {shown(name)} is unknown; available: {names}")
        return self._named[name]


def _load_processor(path: str) -> Any:
    processor_class = load_object(IO_PROCESSORS, path)
    if not callable(processor_class):
        raise ConfigurationError(
            f"--io-processor {path} is {shown(processor_class)}; name a class, a subclass of IOProcessor"
        )
    try:
        return processor_class()
    except Exception as error:  # whatever its code raises
        raise ConfigurationError(f"--io-processor {path} cannot be created: {type(error).__name__}: {error}") from error


def _check_processor(processor: Any, item: object) -> None:
    if not isinstance(processor, IOProcessor):
        raise ConfigurationError(
            f"--io-processor {shown(item)} is not an IOProcessor of penstock.producer.io_processors"
        )
    if not isinstance(getattr(processor, "name", None), str) or not processor.name:
        raise ConfigurationError(f"--io-processor {shown(item)} has no name; give its class an attribute of that name")
