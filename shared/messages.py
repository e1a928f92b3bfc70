"""Every message that crosses a process border, in one place.

    client ──EngineCoreRequest, InputChunk──▶ Redis ──▶ worker process ──CoreInput──▶ engine core
    client ◀──────Delta────────── channel and log ◀── worker process ◀──CoreOutput── engine core
    operator ──WorkerCommand──▶ supervisor;   broker ──EngineCommand──▶ worker process ──WorkerStatus──▶ supervisor

What may be asked of an engine, and its answers, are in ``control``.
All are msgspec structs encoded as positional msgpack arrays: the order of fields **is** the wire format, new
fields are only appended and carry a default, so that old bytes still decode (tests/compat holds some). A tag in
the first place tells the members of a union apart; there are no method names and no pickle on any wire.
Names and meanings follow vLLM's engine (``vllm/v1/engine``) where it has them.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from .adapters import LoraSetup
from .control import CallError, ControlCommand, Utility, UtilityAnswer
from .image_stats import ImageStats
from .images import ImageInput
from .kv_offload import KVOffloadStats
from .params import GENERATE, LoRARequest, SamplingParams
from .pooling import Pooled, PoolingParams, PoolingSetup
from .prompt_embeds import PromptEmbeds
from .ranks import RankSetup
from .stats import RequestStats, StepStats
from .tokenization import Tokenization
from .waves import LeaveWave, StartWave, WaveState

WIRE_VERSION = 1
# What a resumed generation goes on with: what a request may demand, and what `Ready` tells of an engine.
EXACT, GREEDY = "exact", "greedy"


class FinishReason(enum.StrEnum):
    """Why a request ended. The first five are vLLM's; the others are told apart from "abort" and "length"."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ENGINE_LOST = "engine_lost"
    POISONED = "poisoned"


class RequestError(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """What went wrong with one request; ``code`` is that of an exception class in ``errors``."""

    code: str
    message: str
    retryable: bool = False


class Usage(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Token counts of a request; recomputed tokens (preemption, resume) are not counted twice.

    ``num_cached_tokens`` of the prompt were in the KV cache when the engine that ended the request first began with it.
    Of a resumable request they are those of its last segment, former output included; the other two count all segments.
    Of a prediction, ``num_accepted_prediction_tokens`` are in the output, and the rejected ones are not.
    """

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0


# --------------------------------------------------------------------- client -> worker -> engine core


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="add", gc=False):
    """A generation to run, or with ``pooling_params`` a prompt to pool. The client fills the prompt in one of four
    forms; the worker turns text into token ids.

    ``epoch``, ``attempt`` and ``output_token_ids`` are the broker's: set at claim, never by a client.
    ``session_id`` is the caller's name for what the request goes on with; its engine has no use for it.
    ``resume`` is "exact" for a request that no engine shall take which could not go on with its very tokens.
    The prompt of a ``resumable`` request is its first chunk; more follow as ``InputChunk`` until its input is closed.
    ``text_pair`` is the second text of a pair, to be judged together; from its token ``second_text_at`` on the tokens
    are those of the second text, which some models tell apart.
    ``tokenization`` is for the worker process, whose engine gets tokens.
    ``prediction`` is text that its caller takes for a likely output, and ``draft_token_ids`` are the tokens of it; it
    changes how soon tokens come, and never which.
    ``images`` are those of the prompt, in the order of their places in it. A message to an engine core has their bytes.
    """

    version: int = WIRE_VERSION
    request_id: str
    prompt_token_ids: list[int] | None = None
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    arrival_time: float = 0.0
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    external_req_id: str | None = None
    session_id: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str = ""
    tenant: str = "default"
    deadline: float | None = None
    epoch: int = 0
    attempt: int = 0
    output_token_ids: list[int] | None = None
    band: str = ""
    resumable: bool = False
    prompt_embeds: PromptEmbeds | None = None
    resume: str = ""
    text_pair: str | None = None
    second_text_at: int | None = None
    prediction: str | None = None
    draft_token_ids: list[int] | None = None
    tokenization: Tokenization | None = None
    images: list[ImageInput] | None = None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """What its tokenization or its parameters say; None keeps the whole prompt."""
        said = None if self.tokenization is None else self.tokenization.truncate_prompt_tokens
        params = self.pooling_params or self.sampling_params
        return said if said is not None or params is None else params.truncate_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Of a prompt that is token ids or embeddings; 0 while it is text."""
        return len(self.prompt_token_ids or ()) if self.prompt_embeds is None else self.prompt_embeds.shape[0]


class InputChunk(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, gc=False):
    """What a resumable request goes on with once it has answered what came before: text or token ids, one of both.

    ``sampling_params`` are those of the answer to it, and None those of the request. Without a seed of their own,
    randomness follows from the request's.
    """

    version: int = WIRE_VERSION
    prompt_token_ids: list[int] | None = None
    prompt: str | None = None
    sampling_params: SamplingParams | None = None


class AbortRequests(msgspec.Struct, array_like=True, tag="abort"):
    """Stop these requests; unknown and finished ids are ignored."""

    request_ids: list[str]


class Configure(msgspec.Struct, array_like=True, tag="configure"):
    """The worker's answer to ``Hello``: the engine's whole configuration, as JSON (``worker.config.EngineConfig``)."""

    config_json: bytes


class UtilityCall(msgspec.Struct, array_like=True, tag="utility"):
    """A question to the engine core that is answered by a ``UtilityOutput`` of the same ``call_id``."""

    call_id: int
    call: Utility


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """Leave the busy loop and exit with status 0."""


CoreInput = EngineCoreRequest | AbortRequests | Configure | UtilityCall | Shutdown | StartWave | LeaveWave


# --------------------------------------------------------------------- engine core -> worker


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First message of an engine core: who it is. The worker answers with ``Configure``."""

    version: int
    pid: int


class Ready(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="ready"):
    """The model is loaded and the KV cache allocated; requests may come. ``model_folder`` holds the tokenizer.

    ``attention_backend`` is what attends: "triton", "native", "reference" or, where transformers' code does, that.
    ``processor`` is the name of the GPU or the CPU, ``instructions`` are those of it that kernels may use.
    ``kernel_instructions`` is the best that the compiled kernels do use: "amx", "avx512_bf16", …; empty without them.
    ``engine`` is what computes, as ``--engine`` calls it, and ``versions`` are those of what it runs.
    ``resume`` is what an engine that takes over a request goes on with: "exact", the tokens that the former one would
    have made; or "greedy", those of greedy requests only, while others go on with tokens drawn anew.
    ``supported_tasks`` are what requests may ask for, and ``pooling`` what is known of a model that pools.
    ``lora`` is what there is room for of adapters; None of an engine that serves none.
    ``speculative`` says what guesses, as the option does, and ``num_free_rows`` how many tokens of a step cost little
    more than one (measured where something guesses, else 0): those beyond the requests' own are for guesses.
    ``max_images`` are those that a request may have; with 0 ``image_refusal`` says why.
    ``logits_processors`` are the names that ``extra_args`` may have.
    ``weights_version`` is a digest of the weights; empty of an engine that does not say.
    ``ranks`` are the processes that compute the model together; None where it is the core alone.
    ``num_shared_experts`` are those of a layer, which the ranks of a data-parallel group share; 0 of other engines.
    """

    version: int = WIRE_VERSION
    model_folder: str
    architecture: str
    max_model_len: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    vocab_size: int
    eos_token_ids: list[int]
    num_parameters: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    kv_cache_size_tokens: int = 0
    load_time_s: float = 0.0
    attention_backend: str = ""
    kv_cache_dtype: str = ""
    processor: str = ""
    instructions: list[str] = []
    kernel_instructions: str = ""
    engine: str = "penstock"
    resume: str = EXACT
    versions: dict[str, str] = {}
    quantization: str = ""
    scheduling_policy: str = ""
    enable_prefix_caching: bool = False
    async_scheduling: bool = False
    structured_outputs_backend: str = ""
    supported_tasks: tuple[str, ...] = (GENERATE,)
    pooling: PoolingSetup | None = None
    lora: LoraSetup | None = None
    speculative: str = "off"
    num_free_rows: int = 0
    max_images: int = 0
    image_refusal: str = ""
    logits_processors: tuple[str, ...] = ()
    weights_version: str = ""
    ranks: RankSetup | None = None
    num_shared_experts: int = 0


class StartupFailed(msgspec.Struct, array_like=True, tag="startup_failed"):
    """The engine core cannot start; it exits after this. ``trace`` is empty for errors that a sentence explains."""

    code: str
    message: str
    trace: str = ""


class TokenLogprobs(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Log probability of an output token, its rank (1 is the most probable), and pairs of the most probable tokens and
    theirs, in descending order. The token is among ``top`` only if its rank is.

    ``texts`` are the bytes of the token, then of each of ``top``, which the worker process adds; none with
    ``detokenize=False``. A token may be a part of a character only.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    texts: list[bytes] = []


class EngineCoreEventType(enum.IntEnum):
    """What happened to a request inside the engine core."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """``timestamp`` is in seconds of the host's monotonic clock, which its processes share."""

    type: EngineCoreEventType
    timestamp: float


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one request out of one step, and its end if it ended.

    ``new_logprobs`` has one entry per token, or none at all if the request did not ask. With the first token comes
    ``new_prompt_logprobs``, one per token of the prompt but its first. ``events`` are those since its last output.
    ``pooled`` is the result of a prompt that was pooled, and comes with its end.
    ``num_prompt_tokens`` comes with tokens of a prompt with images: how many it has with theirs.
    """

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    num_cached_tokens: int = 0
    new_logprobs: list[TokenLogprobs] = []
    new_prompt_logprobs: list[TokenLogprobs] = []
    events: list[EngineCoreEvent] = []
    pooled: Pooled | None = None
    num_prompt_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """State of the scheduler after a step.

    ``prefix_cache_queries`` and ``prefix_cache_hits`` count tokens since the start: those of requests that looked for
    cached ones, and those found. ``num_draft_tokens`` are those guessed, ``num_accepted_tokens`` those guessed right.
    ``kv_offload`` is of blocks kept beside the KV cache, ``images`` of a model that reads some; None of others.
    ``wave`` is that of a rank's group.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    step_counter: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    device_memory_bytes: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    kv_offload: KVOffloadStats | None = None
    images: ImageStats | None = None
    wave: WaveState | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="outputs"):
    """Everything one step produced. Without ``step_stats`` it tells of no step; ``timestamp`` is that of its end.

    ``lora_digests`` are those of the adapters that are loaded, sorted: all of them, whenever the set has changed, and
    None while it is as it was told last. Before the first word it is empty.
    """

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    step_stats: StepStats | None = None
    lora_digests: list[str] | None = None


class UtilityOutput(msgspec.Struct, array_like=True, omit_defaults=True, tag="utility_output"):
    """The answer to a ``UtilityCall``, or why there is none."""

    call_id: int
    error: CallError | None = None
    answer: UtilityAnswer | None = None


CoreOutput = EngineCoreOutputs | UtilityOutput | Hello | Ready | StartupFailed


# --------------------------------------------------------------------- worker -> client


class SegmentEnd(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """The end of what a resumable request generated from chunk ``number`` of its input, counted from 0.

    ``next_index`` is the index of the first output token that does not belong to it any more.
    """

    number: int
    next_index: int
    finish_reason: FinishReason
    stop_reason: int | str | None = None


class Delta(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one append added to a request: the record in its log and the message on its channel.

    ``index`` is the position of ``token_ids[0]`` among the output tokens, so a reader can tell a gap and a repeat.
    ``text`` may lag behind ``token_ids`` while a character is incomplete or a stop string may be forming.
    The last delta, and no other, carries ``finish_reason``.
    ``logprobs`` has one entry per token of ``token_ids``, or none at all if the request did not ask.
    ``prompt_logprobs`` has one entry per token of the prompt but its first, if the request asked; it comes once, with
    the first token, and beside it ``first_prompt_token``: id and bytes of the first, which has no log probability.
    ``stats`` come with the first token and with the end.
    ``child`` says which of a request's ``n`` answers it belongs to; set by the client, 0 on the wire.
    ``segment_ends`` are the ends of a resumable request's segments in it. A record of the log, and a delta of a stream,
    has at most one, as the last it says; ``usage`` then counts what there was so far.
    ``pooled`` is the result of a prompt that was pooled: its only record, which has no tokens.
    ``weights_version`` is what the tokens from here on are computed with. The first delta has it that an engine writes:
    so a request whose first engine died, or got other weights, tells it again. Of several deltas in one, the last.
    """

    version: int = WIRE_VERSION
    index: int = 0
    token_ids: list[int] = []
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    usage: Usage | None = None
    logprobs: list[TokenLogprobs] = []
    child: int = 0
    prompt_logprobs: list[TokenLogprobs] = []
    stats: RequestStats | None = None
    segment_ends: list[SegmentEnd] = []
    first_prompt_token: tuple[int, bytes] | None = None
    pooled: Pooled | None = None
    weights_version: str = ""

    def extend(self, later: Delta) -> None:
        """Add what the next delta says: this one then says both, as ``followed_by`` would, and costs no copy."""
        self.token_ids += later.token_ids
        self.text += later.text
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.usage = later.error, later.usage
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.first_prompt_token = self.first_prompt_token or later.first_prompt_token
        self.stats = later.stats or self.stats
        self.segment_ends += later.segment_ends
        self.pooled = later.pooled or self.pooled
        self.weights_version = later.weights_version or self.weights_version

    def followed_by(self, later: Delta) -> Delta:
        """Return one delta that says what this one and the next say one after the other."""
        return msgspec.structs.replace(
            later,
            index=self.index,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
            stats=later.stats or self.stats,
            segment_ends=self.segment_ends + later.segment_ends,
            first_prompt_token=self.first_prompt_token or later.first_prompt_token,
            weights_version=later.weights_version or self.weights_version,
        )

    @property
    def next_index(self) -> int:
        """Index of the token that follows this delta; pass ``next_index - 1`` as ``after`` to resume here."""
        return self.index + len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def segment_finish_reason(self) -> FinishReason | None:
        """Why the last segment that it tells the end of has ended; None if it tells of none."""
        return self.segment_ends[-1].finish_reason if self.segment_ends else None


# --------------------------------------------------------------------- broker -> worker, operator -> supervisor


class CancelCommand(msgspec.Struct, array_like=True, tag="cancel"):
    """The request was cancelled in Redis; its engine should stop computing it."""

    request_id: str


class DrainCommand(msgspec.Struct, array_like=True, tag="drain"):
    """Take no new wave, finish what runs, then exit."""

    timeout_s: float | None = None


class StopCommand(msgspec.Struct, array_like=True, tag="stop"):
    """Hand back what runs and exit at once."""


class ScaleCommand(msgspec.Struct, array_like=True, tag="scale"):
    """Serve with so many engines: start those that lack, drain those beyond."""

    num_engines: int


class EngineState(enum.StrEnum):
    """What an engine is doing. The last two are said by a worker process of itself as it ends."""

    STARTING = "starting"
    COMPILING = "compiling"
    READY = "ready"
    BUSY = "busy"
    STALLED = "stalled"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    DEAD = "dead"
    STOPPED = "stopped"
    FAILED = "failed"


class WorkerStatus(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A line of JSON that a worker process writes to its standard output: at every change of state, and once a second
    while it lives, so that its silence says something.

    ``is_external`` says of a failure that it came from outside (a signal sent to the core), ``num_tokens`` how many
    tokens the engine has generated in this life: a restart that got no further than the one before counts as a loop.
    ``heartbeat`` is an ``EngineHeartbeat``, not in every line: the supervisor knows by it while Redis is away.
    ``weights_folder`` is that of weights which were put in place of the configured ones, for the next life to begin
    with, and ``weights_version`` what they are called; empty while there are none.
    """

    version: int = WIRE_VERSION
    engine_id: str
    state: EngineState
    code: str = ""
    message: str = ""
    trace: str = ""
    is_external: bool = False
    num_tokens: int = 0
    heartbeat: msgspec.Raw = msgspec.Raw()
    weights_folder: str = ""
    weights_version: str = ""


EngineCommand = CancelCommand | ControlCommand
WorkerCommand = DrainCommand | StopCommand | ScaleCommand
