"""Records in Redis besides the requests: model cards, heartbeats, the dead letter.

The rules of messages hold: new fields are only appended and have a default, old bytes still decode (tests/compat).
Processes of other versions may write records that this one cannot read: one of them must not hide all the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from ..messages import WIRE_VERSION
from ..messages.core import GroupStatus, RankSetup
from ..messages.supervision import EngineState
from ..params.kinds import GENERATE
from ..params.lora import LoraSetup
from ..params.pooling import PoolingSetup
from ..process.log import get_logger
from ..stats import EngineStats

# Shown in lists instead of such a record.
UNREADABLE = "unreadable (newer version?)"
# Records are read again every second, so each is logged once.
MAX_REPORTED = 1000
T = TypeVar("T")
log = get_logger(__name__)
_reported: set[tuple[str, str]] = set()


class EngineSetup(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """Configuration and hardware of an engine. JSON, as a part of other records.

    Args:
        kv_cache_size_tokens: capacity of its KV cache.
        attention_backend, kv_cache_dtype, processor, instructions, kernel_instructions, engine, resume, lora,
            speculative, num_free_rows, ranks, weight_bytes, kv_cache_bytes: as in ``messages.Ready``.
        num_threads: threads of an engine on the CPU; 0 for its own choice.
        versions: versions of its software, by name.
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
    weight_bytes: int = 0
    kv_cache_bytes: int = 0


class ModelCard(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Facts about a served model for clients; written by its workers when ready. JSON, so people can read it.

    Args:
        max_model_len: max tokens of prompt and output together; 0 if no worker has reported it.
        dtype, quantization: those of the weights; quantization is "" without one.
        eos_token_ids: tokens that end a generation, unless ``ignore_eos``.
        has_chat_template: whether a prompt may be messages.
        generation_config: the model authors' settings, from ``generation_config.json``; requests do not use them
            by themselves.
        supported_tasks: tasks that requests may name.
        is_tracing_enabled: whether its workers write spans of requests.
        registered_at: when a worker last wrote the card, in seconds since the epoch; 0 if none has loaded the model,
            so that the card says only what its files say.
        attention_backend, kv_cache_dtype: as in ``messages.Ready``.
        tool_call_parser, reasoning_parser: those that fit the model; empty if none is known.
        setup: setup of the engine that wrote the card; heartbeats have those of other engines.
        pooling: pooling of a model that pools; None for one that generates.
        logits_processors: names that ``extra_args`` of a request may use.
        max_images: max images of a request; None if no worker has reported it. With 0, ``image_refusal`` is the reason.
        thinks_before_grammar: whether a grammar waits for the end of reasoning, as ``reasoning_parser`` marks it.
        weights_version: version of the weights of that engine; heartbeats have those of others.
        system_anywhere: whether its chat template renders system messages after the first user message. If not, workers
            send them to the model as user text between ``<system-reminder>`` tags, at the same place.
        takes_developer: whether its chat template renders the role "developer". If not, it is "system".
        tool_call_source: source of ``tool_call_parser``: the tokenizer's "response_template" or "chat_template", or its
            "vocabulary".
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
    system_anywhere: bool = False
    takes_developer: bool = False
    tool_call_source: str = ""


class DeviceUse(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """Use of a GPU by all processes. JSON, as a part of heartbeats. Values that the driver does not report are None.

    Args:
        busy_share: share of the last second in which the device computed.
    """

    busy_share: float | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None


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
    # When a dead engine starts again, in seconds since the epoch; 0 if it will not.
    restart_at: float = 0.0
    stats: EngineStats | None = None
    # Its name in metrics, the same for all processes of its worker. "" if the worker has none.
    engine_name: str = ""
    # Once its model is loaded.
    setup: EngineSetup | None = None
    # Digests of its loaded adapters.
    lora_digests: list[str] = []
    # Version of its weights: the passed name, or a digest.
    weights_version: str = ""
    # Only for a rank of a data-parallel group.
    group: GroupStatus | None = None
    # While it sleeps, goes to sleep or wakes up, else 0.
    sleep_level: int = 0
    # None on a CPU, or without nvidia-ml-py.
    device_use: DeviceUse | None = None
    # When a draining engine returns the requests that still run, in seconds since the epoch; else 0.
    drains_until: float = 0.0

    @property
    def state_words(self) -> str:
        """Its state for people: "busy", "sleeping 1", or "sleeping 2, unloaded" for an engine without a core."""
        if self.state is not EngineState.SLEEPING or not self.sleep_level:
            return self.state.value
        return f"{self.state.value} {self.sleep_level}{'' if self.core_pid else ', unloaded'}"


class DeathCause(msgspec.Struct, array_like=True, omit_defaults=True, kw_only=True):
    """The cause of an engine's death; stored with the requests that are parked for it."""

    version: int = WIRE_VERSION
    engine_id: str
    reason: str
    last_step: int = 0
    trace: str = ""


class DeadRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A parked request, as ``penstock dead`` shows it.

    ``payload`` is the encoded ``EngineCoreRequest``, or other data from the lane: then ``is_request`` is
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


def decode_record(kind: str, name: str, data: bytes, type_: type[T]) -> T | None:
    """Return a JSON record; None if it cannot be read, which is logged once.

    Args:
        kind: kind of record, such as "model card".
        name: name of the record.
    """
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, ValueError) as error:  # msgspec lets what a struct itself raises through
        note_unreadable(kind, name, error)
        return None


def decode_records(kind: str, pairs: Iterable[tuple[str, bytes]], type_: type[T]) -> Iterator[T]:
    """Iterate over the readable ones of many records, passed by name."""
    for name, data in pairs:
        record = decode_record(kind, name, data, type_)
        if record is not None:
            yield record


def note_unreadable(kind: str, name: str, error: Exception) -> None:
    """Log once that a record was skipped."""
    if (kind, name) in _reported or len(_reported) >= MAX_REPORTED:
        return
    _reported.add((kind, name))
    log.warning("record_unreadable", kind=kind, name=name, reason=str(error))
