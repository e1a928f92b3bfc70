"""Logits processors of an operator's own, which requests choose by name.

A processor is a class that ``worker start --logits-processors my_module:Ban`` names::

    from penstock.worker.engine.logits_processors import LogitsProcessor

    class Ban(LogitsProcessor):
        name = "ban"

        def apply(self, output_token_ids, logits):
            logits[self.args["token_ids"]] = float("-inf")
            return logits

and a request wants it by ``SamplingParams(extra_args={"logits_processors": {"ban": {"token_ids": [5]}}})``. It works on
one request's logits, as the request-level processors of vLLM do: so a request's tokens depend on no other's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...shared.errors import ConfigurationError, ValidationError
from ...shared.params.extra_args import check_known, processors_of
from ...shared.params.sampling import SamplingParams
from ...shared.process.plugins import LOGITS_PROCESSORS, load_object
from ...shared.values.shown import shown

if TYPE_CHECKING:
    from torch import Tensor

PROCESSOR_FAILED = "logits_processor_failed"


class ProcessorFailedError(Exception):
    """A processor raised, or returned what cannot be sampled from. The fault of one request, not of its engine."""


@dataclass(frozen=True)
class ProcessedRequest:
    """What a processor may know of its request from the beginning; a prompt of embeddings has no tokens."""

    prompt_token_ids: Sequence[int]
    vocab_size: int
    eos_token_ids: frozenset[int]


class LogitsProcessor(ABC):
    """Changes the logits of a request before each of its tokens.

    It is made anew whenever the request comes into a batch: at first, after a preemption, at the engine that goes on
    after a death. So what it does must follow from its arguments and the tokens that ``apply`` is given; what it keeps
    beside them is a cache, and it may be asked twice for the same place. It runs in the engine's thread: while it
    works, no request of the engine goes on.

    Attributes:
        name: by which requests choose it.
        args: what the request said, plain data.
        request: what is known of the request.

    Raises:
        ValueError: the arguments are wrong; the request is refused with these words.
    """

    name: ClassVar[str]

    def __init__(self, args: dict[str, Any], request: ProcessedRequest) -> None:
        self.args = args
        self.request = request

    @abstractmethod
    def apply(self, output_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Return the logits of the next token, ``[V]`` float32 on the engine's device; may change ``logits``.

        Args:
            output_token_ids: all so far, those of former engines included.

        Raises: whatever it likes; the request then ends with an error that tells it.
        """


@dataclass(frozen=True)
class ChosenProcessor:
    """One that a request has chosen, with what it is made of."""

    kind: type[LogitsProcessor]
    args: dict[str, Any]
    request: ProcessedRequest

    @property
    def name(self) -> str:
        return self.kind.name

    def make(self) -> LogitsProcessor:
        """Return the processor. Raises whatever its author likes."""
        return self.kind(self.args, self.request)


class LogitsProcessors:
    """The processors of an engine, by name.

    Raises:
        ConfigurationError: two have one name.
    """

    def __init__(self, kinds: Iterable[type[LogitsProcessor]] = ()) -> None:
        self._kinds: dict[str, type[LogitsProcessor]] = {}
        for kind in kinds:
            if self._kinds.setdefault(kind.name, kind) is not kind:
                raise ConfigurationError(f"two logits processors are named {shown(kind.name)}; rename one")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._kinds)

    def choose(self, params: SamplingParams, request: ProcessedRequest) -> tuple[ChosenProcessor, ...]:
        """Return those that ``params`` choose, in their order, once each could be made.

        Raises:
            ValidationError: there is no such processor, or its arguments are wrong.
        """
        check_known(params.extra_args, self._kinds)
        chosen = []
        for name, args in processors_of(params.extra_args).items():
            one = ChosenProcessor(self._kinds[name], args, request)
            try:
                one.make()
            except BaseException as error:  # whatever its author raises
                raise ValidationError(
                    f"extra_args.logits_processors.{name} cannot be made of {shown(args)}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            chosen.append(one)
        return tuple(chosen)


def load_logits_processors(names: Iterable[str]) -> LogitsProcessors:
    """Load the processors an operator has named.

    Raises:
        ConfigurationError: one cannot be imported, or is no processor.
    """
    kinds = []
    for text in names:
        kind = load_object(LOGITS_PROCESSORS, text)
        is_processor = isinstance(kind, type) and issubclass(kind, LogitsProcessor)
        if not is_processor or not isinstance(getattr(kind, "name", None), str) or not kind.name:
            raise ConfigurationError(
                f"--logits-processors {text} must be a subclass of LogitsProcessor with a name, got {shown(kind)}"
            )
        kinds.append(kind)
    return LogitsProcessors(kinds)
