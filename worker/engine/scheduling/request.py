"""Runtime state of one request inside the engine core, and the interfaces of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ....shared.messages.outcome import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
import enum
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ....shared.messages.core import EngineCoreEvent, EngineCoreEventType
from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.params.lora import LoRARequest
from ....shared.params.pooling import PoolingParams
from ....shared.params.prompts import PromptEmbeds
from ....shared.params.sampling import SamplingParams
from .block_pool import GroupTables, InvariantError
from .prompt_inputs import ImageSpan


class Constraint(Protocol):
    """The set of tokens that a request's grammar allows next."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def ending_token_ids(self) -> list[int]:
        """Tokens that end the output where the grammar may end."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Whether the last token ended the output."""
        ...

    @property
    def failure(self) -> RequestError | None:
        """Reason why the request must end without its last token; None if it need not."""
        ...

    def fill(self, bitmask: NDArray[np.int32], row: int) -> bool:
        """Write the allowed tokens into ``row`` of ``bitmask``, ``[rows, words of 32 tokens]``; False if it failed."""
        ...

    def accept(self, token_id: int) -> RequestError | None:
        """Advance by a token as soon as it is sampled; return ``failure``."""
        ...

    def forced_tokens(self, room: int) -> list[int]:
        """Return at most ``room`` tokens that likely spell the text that must follow; none if there is a choice."""
        ...

    def fail_no_allowed_tokens(self) -> None:
        """Set ``failure``: other parameters forbid all tokens that the grammar allows."""
        ...


class ProcessorFactory(Protocol):
    """Creates a logits processor for one request, each time that the request enters a batch."""

    @property
    def name(self) -> str:
        """Name by which the request chose the processor."""
        ...

    def make(self) -> Any:
        """Create the processor (``engine/logits_processors.py``)."""
        ...


NO_LORA = -1


class RequestStatus(enum.Enum):
    """State of a request; ``_NEXT`` lists the allowed transitions."""

    WAITING = "waiting"
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = "waiting_for_structured_output_grammar"
    WAITING_FOR_ADAPTER = "waiting_for_adapter"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH_CAPPED = "finished_length_capped"
    FINISHED_REPETITION = "finished_repetition"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_ERROR = "finished_error"


_FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED"))
_NEXT: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: _FINISHED
    | {
        RequestStatus.RUNNING,
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        RequestStatus.WAITING_FOR_ADAPTER,
    },
    RequestStatus.WAITING_FOR_ADAPTER: _FINISHED | {RequestStatus.WAITING},
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: _FINISHED | {RequestStatus.WAITING},
    RequestStatus.RUNNING: _FINISHED | {RequestStatus.PREEMPTED},
    RequestStatus.PREEMPTED: _FINISHED | {RequestStatus.RUNNING},
    **{status: frozenset() for status in _FINISHED},
}
STATUS_OF_REASON = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.REPETITION: RequestStatus.FINISHED_REPETITION,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}


class Pooling(NamedTuple):
    """Pooling options of a request.

    Args:
        reads_prefix_cache: whether cached tokens may be skipped, since the pooler needs no hidden states of the first
            tokens.
        second_text_at: index of the first token of the second text of a pair; None for a single text.
    """

    params: PoolingParams
    reads_prefix_cache: bool
    second_text_at: int | None = None


class Request:
    """A generation in progress, or a prompt to pool.

    ``token_ids`` holds prompt and output; ``num_computed_tokens`` of them are in the KV cache. The scheduler raises
    ``num_computed_tokens`` up to the length of ``token_ids``; then the next token is sampled and appended.

    Args:
        output_token_ids: tokens that a previous engine has already delivered. They count as output (for
            ``max_tokens``, ``min_tokens`` and randomness), are computed again, and are not delivered again.
        eos_token_ids: the model's end-of-sequence tokens.
        max_model_len: limit on the tokens of prompt and output together.
        priority: lower goes first, if the ordering policy uses it.
        extra_keys: keys, in addition to the tokens, that must be equal for two requests to share KV-cache blocks.
        prompt_embeds: replace the prompt's tokens, which are placeholders then.
        lora_index: slot of its adapter while it runs, or ``NO_LORA``.
        lora_request: the requested adapter; None for the base model.
        pooling: pooling options; None for a generation. Such a request ends when its prompt is computed.
        prediction: tokens that the caller expects as output.
        images: images of its prompt; their tokens are in ``prompt_token_ids``.

    Attributes:
        block_hashes: hashes of its first full blocks, computed on demand (``prefix_cache.py``).
        group_tables: its blocks if layers keep different parts of it; None if ``block_table`` has all blocks.
        events: events since its last output.
        constraint: grammar of its ``structured_outputs``; None without, and while the grammar is compiled.
        order_key: key assigned by an operator's ordering policy; () under another policy.
        processors: the operator's logits processors that its ``extra_args`` choose.
        num_cached_tokens: prompt tokens that were in the KV cache when it was first admitted.
        num_in_flight_tokens: tokens computed by a batch whose result is pending (``BatchQueue``).
        prompt_logprobs: log probabilities known so far, from the prompt's second token on; None if not requested or
            already delivered.
    """

    __slots__ = (
        "arrival_index",
        "block_hashes",
        "block_table",
        "constraint",
        "eos_token_ids",
        "events",
        "extra_keys",
        "group_tables",
        "images",
        "is_finished",
        "lora_index",
        "lora_request",
        "max_output_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_prompt_tokens",
        "order_key",
        "params",
        "pooling",
        "prediction",
        "priority",
        "processors",
        "prompt_embeds",
        "prompt_logprobs",
        "request_id",
        "seed",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        output_token_ids: list[int] | None = None,
        priority: int = 0,
        extra_keys: tuple[str | None, ...] = (),
        prompt_embeds: PromptEmbeds | None = None,
        lora_index: int = NO_LORA,
        lora_request: LoRARequest | None = None,
        pooling: Pooling | None = None,
        prediction: list[int] | None = None,
        images: tuple[ImageSpan, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.token_ids = prompt_token_ids + (output_token_ids or [])
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_in_flight_tokens = 0
        self.block_table: list[int] = []
        self.group_tables: GroupTables | None = None
        self.block_hashes: list[bytes] = []
        self.extra_keys = extra_keys
        self.prompt_embeds = prompt_embeds
        self.lora_index = lora_index
        self.lora_request = lora_request
        self.pooling = pooling
        self.prediction = prediction
        self.images = images
        wants_prompt_logprobs = params.prompt_logprobs is not None and not output_token_ids
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wants_prompt_logprobs else None
        self.events: list[EngineCoreEvent] = []
        self.constraint: Constraint | None = None
        self.processors: tuple[ProcessorFactory, ...] = ()
        self.status = RequestStatus.WAITING
        self.is_finished = False
        self.priority = priority
        self.arrival_index = 0
        self.order_key: tuple[float, ...] = ()
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        room = max_model_len - self.num_prompt_tokens
        self.max_output_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        # The client draws a seed when it enqueues. Without one, derive it from the request id, because an engine that
        # resumes the request must draw the same numbers.
        self.seed = zlib.crc32(request_id.encode()) if params.seed is None else params.seed

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, including those of a previous engine."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """Tokens of the prompt; empty for prompt embeddings."""
        return self.token_ids[: self.num_prompt_tokens] if self.prompt_embeds is None else []

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that end the request once it has ``min_tokens``."""
        return self.eos_token_ids | self.stop_token_ids

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that are not in the KV cache yet."""
        return len(self.token_ids) - self.num_computed_tokens

    def after_flight(self) -> tuple[int, int]:
        """Return how many tokens will be in the KV cache after the batch in flight, and how many known ones will not.

        Assumes that the batch gives one token, which ends the request only if it is the last one allowed. If it gives
        more, they are known tokens that a later step computes.
        """
        num_computed_tokens = self.num_computed_tokens + self.num_in_flight_tokens
        num_uncomputed_tokens = len(self.token_ids) - num_computed_tokens
        if num_uncomputed_tokens == 0 and self.num_output_tokens + 1 < self.max_output_tokens:
            num_uncomputed_tokens = 1
        return num_computed_tokens, num_uncomputed_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached tokens may be skipped: not if each token has a result to return."""
        return self.prompt_logprobs is None and (self.pooling is None or self.pooling.reads_prefix_cache)

    def pop_events(self) -> list[EngineCoreEvent]:
        """Return and clear the events that no output has reported yet."""
        events, self.events = self.events, []
        return events

    def move_to(self, status: RequestStatus) -> None:
        """Change the status.

        Raises:
            InvariantError: ``status`` may not follow the current one.
        """
        if status not in _NEXT[self.status]:
            raise InvariantError(f"request {self.request_id}: {self.status.value} cannot become {status.value}")
        self.status = status
        self.is_finished = status in _FINISHED


class Timeline(Protocol):
    """Receives the scheduler's events."""

    def record(self, request: Request, event: EngineCoreEventType) -> None:
        """Record that ``event`` happens to ``request`` now."""
        ...


class ClockedTimeline:
    """Appends each event with its time to the request's ``events``; ``clock`` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def record(self, request: Request, event: EngineCoreEventType) -> None:
        request.events.append(EngineCoreEvent(event, self._clock()))


class NoTimeline:
    """Records nothing."""

    def record(self, request: Request, event: EngineCoreEventType) -> None:
        pass
