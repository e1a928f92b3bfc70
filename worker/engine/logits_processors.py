"""Custom logits processors, which requests select by name.

A processor is a class that ``worker start --logits-processors my_module:Ban`` names::

    from penstock.worker.engine.logits_processors import LogitsProcessor

    class Ban(LogitsProcessor):
        name = "ban"

        def apply(self, output_token_ids, logits):
            logits[self.args["token_ids"]] = float("-inf")
            return logits

and a request selects it by ``SamplingParams(extra_args={"logits_processors": {"ban": {"token_ids": [5]}}})``. It
changes the logits of one request, as vLLM's request-level processors do, so a request's tokens do not depend on others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...shared.errors import ConfigurationError, ValidationError
from ...shared.params.checks import check_known, processors_of
from ...shared.params.sampling import SamplingParams
from ...shared.process.plugins import LOGITS_PROCESSORS, load_object
from ...shared.values.shown import shown

if TYPE_CHECKING:
    from torch import Tensor

PROCESSOR_FAILED = "logits_processor_failed"


class ProcessorFailedError(Exception):
    """A processor raised, or returned logits that cannot be sampled. Only its request fails."""


@dataclass(frozen=True)
class ProcessedRequest:
    """The initial properties of a processor's request. A prompt of embeddings has no tokens."""

    prompt_token_ids: Sequence[int]
    vocab_size: int
    eos_token_ids: frozenset[int]


class LogitsProcessor(ABC):
    """Changes the logits of a request before each of its tokens.

    A new one is created whenever the request enters a batch: first, after a preemption, and on the engine that resumes
    it. So its result must depend only on its arguments and the tokens passed to ``apply``. Any other state is a cache,
    and ``apply`` may be called twice for the same position. It runs in the engine's main thread, and all requests wait
    meanwhile.

    Attributes:
        name: name by which requests select it.
        args: arguments from the request, as plain data.
        request: initial properties of the request.

    Raises:
        ValueError: the arguments are wrong; the request is refused with this message.
    """

    name: ClassVar[str]

    def __init__(self, args: dict[str, Any], request: ProcessedRequest) -> None:
        self.args = args
        self.request = request

    @abstractmethod
    def apply(self, output_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Return the logits of the next token, ``[V]`` float32 on the engine's device; may change ``logits``.

        Args:
            output_token_ids: all tokens so far, including those of former engines.

        Raises: any exception; the request then ends with an error that contains its message.
        """


@dataclass(frozen=True)
class ChosenProcessor:
    """A processor that a request has selected, with its arguments."""

    kind: type[LogitsProcessor]
    args: dict[str, Any]
    request: ProcessedRequest

    @property
    def name(self) -> str:
        return self.kind.name

    def make(self) -> LogitsProcessor:
        """Create the processor. Raises anything that its author raises."""
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
        """Return the processors that ``params`` select, in order, after creating each once to check its arguments.

        Raises:
            ValidationError: a processor does not exist, or its arguments are wrong.
        """
        check_known(params.extra_args, self._kinds)
        chosen = []
        for name, args in processors_of(params.extra_args).items():
            selected = ChosenProcessor(self._kinds[name], args, request)
            try:
                selected.make()
            except BaseException as error:  # anything that its author raises
                raise ValidationError(
                    f"extra_args.logits_processors.{name} cannot be made of {shown(args)}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            chosen.append(selected)
        return tuple(chosen)


def load_logits_processors(names: Iterable[str]) -> LogitsProcessors:
    """Load the processors an operator has named.

    Raises:
        ConfigurationError: one cannot be imported, or is not a processor.
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
