"""The runtime state of one request inside the engine core."""

from __future__ import annotations

import enum
import zlib
from typing import NamedTuple

from ....shared.messages.from_core import EngineCoreEvent
from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.params.lora import LoRARequest
from ....shared.params.pooling import PoolingParams
from ....shared.params.prompt_embeds import PromptEmbeds
from ....shared.params.sampling import SamplingParams
from .blocks.block_groups import GroupTables
from .blocks.block_pool import InvariantError
from .constraint import Constraint
from .image_spans import ImageSpan
from .wanted_processor import WantedProcessor

NO_LORA = -1


class RequestStatus(enum.Enum):
    """Where a request stands; ``_NEXT`` says what may follow what."""

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
    """What is wanted of a prompt that is pooled.

    Args:
        reads_prefix_cache: the hidden states of its first tokens are not wanted.
        second_text_at: its first token of the second text of a pair; None if there is one text.
    """

    params: PoolingParams
    reads_prefix_cache: bool
    second_text_at: int | None = None


class Request:
    """A generation in progress, or a prompt that is pooled.

    ``token_ids`` holds prompt and output; ``num_computed_tokens`` of them are in the KV cache. The scheduler lets
    the second catch up with the length of the first; when it has, the next token is sampled and appended.

    Args:
        output_token_ids: tokens that a former engine has already delivered. They count as output (for
            ``max_tokens``, ``min_tokens`` and randomness), are computed again, and are not given out again.
        eos_token_ids: the model's end-of-sequence tokens.
        max_model_len: most tokens, prompt and output together, that the request may have.
        priority: the lower, the earlier, if the ordering policy looks at it.
        extra_keys: what must be the same, beside the tokens, for two requests to share blocks of the KV cache.
        prompt_embeds: what stands in the place of the prompt's tokens, which are placeholders then.
        lora_index: the slot of its adapter while it runs, or ``NO_LORA``.
        lora_request: the adapter that it wants; None for the model alone.
        pooling: what is wanted of a prompt that is pooled; such a request ends when its prompt is computed.
        prediction: tokens that its caller takes for a likely output.
        images: those of its prompt, whose tokens are in ``prompt_token_ids``.

    Attributes:
        block_hashes: of its first full blocks, as far as somebody has asked (``prefix_cache.py``).
        group_tables: its blocks where layers keep different parts of it; None where ``block_table`` is all.
        events: what has happened to it since its last output.
        constraint: what its ``structured_outputs`` allow; None without, and while the grammar is compiled.
        order_key: where an operator's own ordering policy puts it; () under another one.
        processors: an operator's own, which its ``extra_args`` choose.
        num_cached_tokens: prompt tokens that were in the KV cache when it was first admitted.
        num_in_flight_tokens: those that a batch computes whose result is still to come (``batch_queue.py``).
        prompt_logprobs: those known of the prompt's second token and on; None if not wanted, or given out.
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
        self.processors: tuple[WantedProcessor, ...] = ()
        self.status = RequestStatus.WAITING
        self.is_finished = False
        self.priority = priority
        self.arrival_index = 0
        self.order_key: tuple[float, ...] = ()
        self.eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        room = max_model_len - self.num_prompt_tokens
        self.max_output_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        # The client draws a seed when it enqueues; without one the request id is the only thing an engine that
        # resumes the request has in common with this one.
        self.seed = zlib.crc32(request_id.encode()) if params.seed is None else params.seed

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those of a former engine included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """Tokens of the prompt; none if it is embeddings."""
        return self.token_ids[: self.num_prompt_tokens] if self.prompt_embeds is None else []

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that end it once it has ``min_tokens``."""
        return self.eos_token_ids | self.stop_token_ids

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that are not in the KV cache yet."""
        return len(self.token_ids) - self.num_computed_tokens

    def after_flight(self) -> tuple[int, int]:
        """How many tokens will be in the KV cache, and how many known ones will not, once the batch in flight is done.

        It is taken for granted that one token is on its way, and that it does not end the request unless it is the last
        one allowed. Should more come, they are known tokens that a later step computes.
        """
        num_computed_tokens = self.num_computed_tokens + self.num_in_flight_tokens
        num_uncomputed_tokens = len(self.token_ids) - num_computed_tokens
        if num_uncomputed_tokens == 0 and self.num_output_tokens + 1 < self.max_output_tokens:
            num_uncomputed_tokens = 1
        return num_computed_tokens, num_uncomputed_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether tokens may be skipped that are in the KV cache: not if something is wanted of each of them."""
        return self.prompt_logprobs is None and (self.pooling is None or self.pooling.reads_prefix_cache)

    def take_events(self) -> list[EngineCoreEvent]:
        """Return the events that no output has told yet."""
        events, self.events = self.events, []
        return events

    def move_to(self, status: RequestStatus) -> None:
        """Change the status.

        Raises:
            InvariantError: ``status`` may not follow the present one.
        """
        if status not in _NEXT[self.status]:
            raise InvariantError(f"request {self.request_id}: {self.status.value} cannot become {status.value}")
        self.status = status
        self.is_finished = status in _FINISHED
