"""What is kept in Redis beside the requests themselves: model cards, heartbeats, the dead letter.

Same rules as for messages: new fields are only appended and carry a default, old bytes still decode (tests/compat).
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..messages import WIRE_VERSION
from ..messages.ranks import RankSetup
from ..messages.waves import GroupStanding
from ..messages.worker_status import EngineState
from ..params.adapters import LoraSetup
from ..params.kinds import GENERATE
from ..params.pooling import PoolingSetup
from ..stats.engine import EngineStats


class EngineSetup(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """What an engine was started with, and on what. JSON, as a part of others.

    Args:
        kv_cache_size_tokens: what its KV cache holds.
        attention_backend, kv_cache_dtype, processor, instructions, kernel_instructions, engine, resume, lora,
            speculative, num_free_rows, ranks: as in ``messages.Ready``.
        num_threads: of an engine on the CPU; 0 has chosen by itself.
        versions: of what it runs, by name.
    """

    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    block_size: int = 0
    kv_cache_size_tokens: int = 0
    scheduling_policy: str = ""
    enable_prefix_caching: bool = False
    async_scheduling: bool = False
    deterministic: bool = False
    dtype: str = ""
    kv_cache_dtype: str = ""
    quantization: str = ""
    attention_backend: str = ""
    structured_outputs_backend: str = ""
    native_kernels: bool = False
    num_threads: int = 0
    processor: str = ""
    instructions: list[str] = []
    versions: dict[str, str] = {}
    kernel_instructions: str = ""
    engine: str = "penstock"
    resume: str = "exact"
    lora: LoraSetup | None = None
    speculative: str = "off"
    num_free_rows: int = 0
    ranks: RankSetup | None = None


class ModelCard(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What a client may know of a served model; written by its workers when ready. JSON, so people can read it.

    Args:
        max_model_len: most tokens of prompt and output together; 0 where no worker has said it.
        dtype, quantization: of the weights; the latter "" without.
        eos_token_ids: end a generation, unless ``ignore_eos``.
        has_chat_template: whether a prompt may be messages.
        generation_config: what the model's makers recommend, from ``generation_config.json``; requests do not follow it
            by themselves.
        supported_tasks: what requests may ask for.
        is_tracing_enabled: whether its workers make spans of requests.
        registered_at: when a worker last said all this, in seconds since the epoch.
        attention_backend, kv_cache_dtype: as in ``messages.Ready``.
        tool_call_parser, reasoning_parser: those that fit its chat template; empty where none is known to.
        setup: of the engine that said all this; others of the model may have another one, which their heartbeats tell.
        pooling: of a model that pools; None of one that generates.
        logits_processors: those that ``extra_args`` of a request may name.
        max_images: that a request may have; None where no worker has said it. With 0 ``image_refusal`` says why.
        thinks_before_grammar: whether a grammar waits for the end of reasoning, as ``reasoning_parser`` marks it.
        weights_version: of the weights of that engine; heartbeats tell those of others.
    """

    version: int = WIRE_VERSION
    model: str
    architecture: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    dtype: str = ""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    quantization: str = ""
    eos_token_ids: list[int] = []
    has_chat_template: bool = False
    generation_config: dict[str, Any] = {}
    supported_tasks: tuple[str, ...] = (GENERATE,)
    is_tracing_enabled: bool = False
    registered_at: float = 0.0
    attention_backend: str = ""
    kv_cache_dtype: str = ""
    setup: EngineSetup | None = None
    pooling: PoolingSetup | None = None
    thinks_before_grammar: bool = False
    logits_processors: tuple[str, ...] = ()
    max_images: int | None = None
    image_refusal: str = ""
    weights_version: str = ""


class EngineHeartbeat(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The state of one engine, renewed every second under a time to live. JSON."""

    version: int = WIRE_VERSION
    worker_id: str
    engine_id: str
    model: str
    state: EngineState
    host: str
    worker_pid: int
    core_pid: int
    supervisor_pid: int = 0
    device: str = ""
    started_at: float = 0.0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    step_counter: int = 0
    tokens_per_s: float = 0.0
    worker_rss_bytes: int = 0
    core_rss_bytes: int = 0
    error: str = ""
    device_memory_bytes: int = 0
    num_restarts: int = 0
    # Set while the engine is dead and waits for its next start, and 0 when none will come: seconds since the epoch.
    restart_at: float = 0.0
    stats: EngineStats | None = None
    # What metrics call it: the same in all lives of its worker. "" of workers that have none.
    engine_name: str = ""
    # Once its model is loaded.
    setup: EngineSetup | None = None
    # Of the adapters that it has loaded.
    lora_digests: list[str] = []
    # What the weights are called that it serves: a name that they were given, or a digest.
    weights_version: str = ""
    # Of a rank of a data-parallel group.
    group: GroupStanding | None = None


class DeathCause(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """Why an engine died; kept with the requests that are parked for it."""

    version: int = WIRE_VERSION
    engine_id: str
    reason: str
    last_step: int = 0
    trace: str = ""


class DeadRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A parked request, as ``penstock dead`` shows it.

    ``payload`` is the encoded ``EngineCoreRequest``, or whatever else was found in the lane: then ``is_request`` is
    False, and it cannot be replayed. ``input_hash`` is the SHA-256 of prompt and sampling parameters, the same for the
    same input under another id; empty if the payload does not decode.
    """

    request_id: str
    parked_at: float
    payload: bytes
    is_request: bool = True
    deliveries: int = 0
    deaths: int = 0
    num_output_tokens: int = 0
    input_hash: str = ""
    cause: DeathCause | None = None
