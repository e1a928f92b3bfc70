"""The I/O processors of a client: found by name, and called so that what they raise is their request's own error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from ...shared.boundary import ends_task, message_of
from ...shared.errors import ConfigurationError, PenstockError, RequestFailedError, UnsupportedParameterError
from ...shared.errors import ValidationError as WrongData
from ...shared.log import get_logger
from ...shared.params.pooling import PoolingParams
from ...shared.plugins import IO_PROCESSORS, load_object
from ...shared.shown import shown
from ..inputs.prompt import as_prompts
from ..long_work import LongWork, in_long_thread
from ..results.pooling import PoolingRequestOutput
from .interface import IOProcessor

PROCESSOR_FAILED = "io_processor_failed"

log = get_logger(__name__)


class NamedProcessor:
    """One processor, called for requests.

    Raises, each method:
        ValidationError: the data is wrong, says the processor; or what Penstock says of what it has made.
        RequestFailedError: it raised anything else, or gave what cannot be used; ``code`` is "io_processor_failed".
    """

    def __init__(self, processor: IOProcessor) -> None:
        self.name = processor.name
        self._processor = processor

    async def prompts(self, data: Any, request_id: str) -> list[Any]:
        """Return the prompts that it makes of ``data``, at least one."""
        parsed = await self._awaited("parse_request", data)
        made = await self._awaited("pre_process", parsed, request_id=request_id)
        if not isinstance(made, str | bytes) and (made is None or not hasattr(made, "__len__")):
            raise self._failed(f"returned {shown(made)} from pre_process, which is neither a prompt nor a list of them")
        prompts = as_prompts(made)
        if not prompts:
            raise self._failed("returned no prompt from pre_process")
        return prompts

    def params(self, params: PoolingParams | None) -> PoolingParams | None:
        """Return the parameters of its prompts."""
        merged = self._outcome("merge_pooling_params", lambda: self._processor.merge_pooling_params(params))
        if not isinstance(merged, PoolingParams | None):
            raise self._failed(f"returned {shown(merged)} from merge_pooling_params, which is no PoolingParams")
        return merged

    async def answer(self, outputs: list[PoolingRequestOutput], request_id: str) -> Any:
        """Return what it makes of the outputs of its prompts."""
        return await self._awaited("post_process", outputs, request_id=request_id)

    def response(self, output: Any) -> msgspec.Raw:
        """Return ``output`` as JSON."""
        told = self._outcome("output_to_response", lambda: self._processor.output_to_response(output))
        try:
            return msgspec.Raw(msgspec.json.encode(told))
        except Exception as error:  # also of strings that are no text, or a loop in it
            raise self._failed(f"gave an answer that is no JSON: {error}") from error

    async def _awaited(self, method: str, argument: Any, **named: Any) -> Any:
        """What a method returns; it raises as all do."""
        function = getattr(self._processor, method)
        if not inspect.iscoroutinefunction(function):
            call = partial(function, argument, **named)
            return await in_long_thread(LongWork.IO_PROCESSORS, self._outcome, method, call)
        try:
            return await function(argument, **named)
        except BaseException as error:  # whatever its code raises
            if ends_task(error):
                raise
            raise self._error_of(method, error) from error

    def _outcome(self, method: str, call: Callable[[], Any]) -> Any:
        """What a method returns; errors are made here, since a StopIteration would never leave a thread."""
        try:
            return call()
        except BaseException as error:  # whatever its code raises; nothing is awaited here, so this cancels no task
            raise self._error_of(method, error) from error

    def _error_of(self, method: str, error: BaseException) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, ValueError) and method in ("parse_request", "pre_process"):
            return WrongData(f"data was refused by I/O processor {shown(self.name)}: {message_of(error)}")
        log.error("io_processor_failed", io_processor=self.name, method=method, exc_info=error)
        return self._failed(f"raised {type(error).__name__} in {method}: {message_of(error)}")

    def _failed(self, what: str) -> RequestFailedError:
        return RequestFailedError(f"I/O processor {shown(self.name)} {what}", code=PROCESSOR_FAILED)


class IOProcessors:
    """Those that an operator or an app has named.

    Args:
        given: entry points of the group ``penstock.io_processors``, ``MODULE:CLASS``, or processors.

    Raises:
        ConfigurationError: one cannot be found or made, is no processor, or has another's name.
    """

    def __init__(self, given: Iterable[str | IOProcessor] = ()) -> None:
        if isinstance(given, str):
            raise ConfigurationError(
                f"io_processors must be a list of names, got {shown(given)}; pass [{shown(given)}]"
            )
        self._named: dict[str, NamedProcessor] = {}
        for one in given:
            processor = _made(one) if isinstance(one, str) else one
            _check(processor, one)
            if processor.name in self._named:
                raise ConfigurationError(f"two I/O processors are called {shown(processor.name)}; name one of them")
            self._named[processor.name] = NamedProcessor(processor)

    def find(self, name: str | None) -> NamedProcessor:
        """Return the one that is meant, which is the only one where ``name`` is None.

        Raises:
            UnsupportedParameterError: there is none of that name, or none at all.
            ValidationError: there are several, and none is named.
        """
        if not self._named:
            raise UnsupportedParameterError(
                "data needs an I/O processor, and none was named: start the gateway with --io-processor NAME, or pass "
                "io_processors=[NAME] to the client"
            )
        known = ", ".join(self._named)
        if name is None:
            if len(self._named) > 1:
                raise WrongData(f"io_processor must name one of {known}, since there are several")
            (name,) = self._named
        if not isinstance(name, str) or name not in self._named:
            raise UnsupportedParameterError(f"io_processor {shown(name)} is not there; those there are: {known}")
        return self._named[name]


def _made(named: str) -> Any:
    kind = load_object(IO_PROCESSORS, named)
    if not callable(kind):
        raise ConfigurationError(f"--io-processor {named} is {shown(kind)}; name a class, a subclass of IOProcessor")
    try:
        return kind()
    except Exception as error:  # whatever its code raises
        raise ConfigurationError(f"--io-processor {named} cannot be made: {type(error).__name__}: {error}") from error


def _check(processor: Any, given: object) -> None:
    if not isinstance(processor, IOProcessor):
        raise ConfigurationError(f"--io-processor {shown(given)} is no IOProcessor of penstock.producer.io_processors")
    if not isinstance(getattr(processor, "name", None), str) or not processor.name:
        raise ConfigurationError(f"--io-processor {shown(given)} has no name; give its class an attribute of that name")
