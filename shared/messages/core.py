"""Messages between a worker process and its engine core, and those of data-parallel ranks to each other."""

from __future__ import annotations

import enum

import msgspec

from ..control.calls import CallError, Utility, UtilityAnswer
from ..params.kinds import GENERATE
from ..params.lora import LoraSetup
from ..params.pooling import Pooled, PoolingSetup
from ..stats import ImageStats, KVOffloadStats, StepStats
from . import WIRE_VERSION
from .outcome import FinishReason, RequestError, TokenLogprobs
from .requests import EXACT, EngineCoreRequest


class WavePhase(enum.StrEnum):
    """Phase of a rank. STARTING: it has begun a wave, and does not know yet whether the others have."""

    IDLE = "idle"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    LEFT = "left"


class WaveState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """State of a rank, in the statistics of its scheduler; ``wave`` is the current one, or the next one."""

    wave: int
    phase: WavePhase


class StartWave(msgspec.Struct, array_like=True, tag="start_wave"):
    """To an engine core: another rank of its group has begun this wave. One that is over is ignored."""

    wave: int


class LeaveWave(msgspec.Struct, array_like=True, tag="leave_wave"):
    """To an engine core: have all ranks of the group leave at their next meeting, for another generation of it."""


class WaveStarted(msgspec.Struct, array_like=True, frozen=True):
    """A rank of this generation has begun a wave. Sent on the group's channel until all ranks are in it."""

    generation: int
    wave: int


class GroupStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine's rank in a data-parallel group, in its heartbeat, which already counts its requests."""

    group: str
    generation: int
    rank: int
    size: int
    wave: int = 0
    phase: WavePhase = WavePhase.IDLE


class RankSetup(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """Processes and memory of the ranks; lists are by rank, and rank 0 is the engine core.

    Args:
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: consecutive stages.
        enable_expert_parallel: each rank has whole experts.
        pids: process ids.
        weight_bytes, kv_cache_bytes: memory of each.
        hosts: name of each rank's host, "" for the core's; empty if all are on its host.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    pids: list[int] = []
    weight_bytes: list[int] = []
    kv_cache_bytes: list[int] = []
    hosts: list[str] = []

    @property
    def local_pids(self) -> list[int]:
        """Process ids of the ranks on the core's host."""
        return [pid for pid, host in zip(self.pids, self.hosts, strict=True) if not host] if self.hosts else self.pids

    def describe(self) -> str:
        """Return the layout in short: "tp 2, pp 2"."""
        sizes = {"tp": self.tensor_parallel_size, "pp": self.pipeline_parallel_size}
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        on_hosts = [f"{len(set(self.hosts))} hosts"] if self.hosts else []
        return ", ".join([*words, *(["ep"] if self.enable_expert_parallel else []), *on_hosts])


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


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First message of an engine core, with its identity. The worker answers with ``Configure``."""

    version: int
    pid: int


class Ready(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True, tag="ready"):
    """The model is loaded and the KV cache allocated; requests may follow. ``model_folder`` has the tokenizer.

    ``attention_backend`` computes attention: "triton", "native", "reference", or an implementation of transformers.
    ``processor`` is the name of the GPU or the CPU, ``instructions`` are its instructions that kernels may use.
    ``kernel_instructions`` is the best set that the compiled kernels use: "amx", "avx512_bf16", …; empty without them.
    ``engine`` is the engine's name in ``--engine``, and ``versions`` are those of its software.
    ``resume`` says how an engine continues a request of another one: "exact", with the tokens that the former engine
    would have generated; or "greedy", for greedy requests only, while others continue with newly drawn tokens.
    ``supported_tasks`` are tasks of requests, and ``pooling`` describes a model that pools.
    ``lora`` is the capacity for adapters; None for an engine that serves none.
    ``speculative`` names the drafting method, as the option does. ``num_free_rows`` is the number of tokens of a step
    that cost little more than one (measured with drafting, else 0): those beyond the requests' tokens are for drafts.
    ``max_images`` is the limit of images per request; with 0, ``image_refusal`` is the reason.
    ``logits_processors`` are the names that ``extra_args`` may have.
    ``weights_version`` is a digest of the weights; empty if the engine does not report one.
    ``ranks`` are the processes that compute the model together; None if the core computes alone.
    ``num_shared_experts`` is the number per layer that the ranks of a data-parallel group share; 0 for other engines.
    ``weight_bytes`` and ``kv_cache_bytes`` are the sizes of weights and KV cache of a core that computes alone; 0 if
    unknown.
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
    weight_bytes: int = 0
    kv_cache_bytes: int = 0


class StartupFailed(msgspec.Struct, array_like=True, tag="startup_failed"):
    """The engine core cannot start; it exits after this. ``trace`` is empty for errors that a sentence explains."""

    code: str
    message: str
    trace: str = ""


class EngineCoreEventType(enum.IntEnum):
    """Kind of event of a request inside the engine core."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """``timestamp`` is in seconds of the host's monotonic clock, which its processes share."""

    type: EngineCoreEventType
    timestamp: float


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one request in one step, and its end if it ended.

    ``new_logprobs`` has one entry per token, or none if they were not requested. The first token's output has
    ``new_prompt_logprobs``, one per token of the prompt but its first. ``events`` are those since its last output.
    ``pooled`` is the result of a prompt that was pooled, and is sent with its end.
    ``num_prompt_tokens`` is sent for a prompt with images, and includes their tokens.
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

    ``prefix_cache_queries`` and ``prefix_cache_hits`` count tokens since the start: those looked up in the cache, and
    those that were in it. ``num_draft_tokens`` counts draft tokens, ``num_accepted_tokens`` accepted ones.
    ``kv_offload`` is for blocks stored outside the KV cache, ``images`` for models that read images; otherwise None.
    ``wave`` is the wave of a rank's group.
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
    """Output of one step. Without ``step_stats`` it belongs to no step; ``timestamp`` is the step's end.

    ``lora_digests`` are those of all loaded adapters, sorted, if the set has changed; None if it is as in the last
    message with it. Before the first such message it is empty.
    """

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    step_stats: StepStats | None = None
    lora_digests: list[str] | None = None


class UtilityOutput(msgspec.Struct, array_like=True, omit_defaults=True, tag="utility_output"):
    """The answer to a ``UtilityCall``, or its error."""

    call_id: int
    error: CallError | None = None
    answer: UtilityAnswer | None = None


CoreOutput = EngineCoreOutputs | UtilityOutput | Hello | Ready | StartupFailed
