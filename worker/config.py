"""The configuration of one engine: written once from the command line, frozen, sent to the core as JSON."""

from __future__ import annotations

import msgspec

from ..shared.errors import ConfigurationError
from .ranges import Range, check_ranges

DEVICES = ("cpu", "cuda")
DEFAULT_TOKEN_BUDGET = {"cpu": 512, "cuda": 2048}
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "fp8")
ATTENTION_BACKENDS = ("auto", "triton", "native", "reference")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
LOAD_FORMATS = ("auto", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
STRUCTURED_OUTPUTS_BACKENDS = ("xgrammar", "llguidance", "auto")
# How often a worker process tells its supervisor what it does, so that its silence means something.
STATUS_INTERVAL_S = 1.0
# Readers take a stream that says nothing for longer for one that hangs.
MAX_STREAM_INTERVAL_MS = 10_000.0
STREAM_INTERVAL_MS = 50.0
# What no machine has, and no deployment means. Beyond it arrays are made that do not fit, or processes without end.
MAX_ENGINES_ON_HOST = 1024
_MAX_SECONDS = 1e9
_ENGINE_RANGES = {
    "max_model_len": Range(2, (1 << 31) - 1, why="a request has a prompt and an output token, and positions 32 bits"),
    "max_num_seqs": Range(1, 65_536),
    "max_num_batched_tokens": Range(1, 1 << 20),
    "block_size": Range(1, 65_536),
    "num_engines_on_host": Range(1, MAX_ENGINES_ON_HOST, "--engines"),
    "num_threads": Range(0, 1024, "--threads", "0 chooses"),
    "kv_cache_memory": Range(1, 1 << 50, why="in bytes"),
}
_WORKER_RANGES = {
    # Shorter than its own beats, it would take the living for dead.
    "lease_ttl_s": Range(0.1, _MAX_SECONDS, "--lease-ttl"),
    "stall_timeout_s": Range(0.1, _MAX_SECONDS, "--stall-timeout"),
    "drain_timeout_s": Range(0, _MAX_SECONDS, "--drain-timeout", "0 hands running requests back at once"),
    "stream_interval_ms": Range(0, MAX_STREAM_INTERVAL_MS, why="0 turns it off"),
    "max_deliveries": Range(1, 1_000_000),
}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an engine core loads its model and schedules.

    Args:
        model: folder, or name on the model hub.
        served_model_name: what clients call it; the last part of ``model`` when empty.
        device: "cpu" or "cuda" (one visible device per engine).
        dtype: "auto" takes the dtype the weights were saved in.
        load_format: "dummy" reads no weights, but draws random ones on the device: speed does not depend on what they
            are. For benchmarks, of models that no disk here has room or time for.
        max_model_len: most prompt plus output tokens of a request; None takes the model's own limit.
        max_num_seqs: most requests in one batch.
        max_num_batched_tokens: token budget of one step; longer prompts are prefilled in chunks. None is 2048 on a GPU
            and 512 on the CPU, where a step with a larger share of prefill holds up everybody's next token
            (135M Llama: inter-token p99 3.5 s with 2048, 0.6 s with 256, at the same throughput).
        scheduling_policy: which of the requests an engine holds goes first and is preempted last: "fcfs" by arrival
            alone, "priority" by the lowest ``priority``, then by arrival.
        block_size: tokens per KV-cache block.
        enable_prefix_caching: a request does not compute again what the beginning of another request of its tenant (and
            cache salt) has left in the KV cache. A model that keeps states besides keys and values does without.
        native_kernels: on the CPU, compile kernels in C++ at the first start, if there is a compiler, and use them.
        quantization: "int8" or "fp8" to keep the weights of linear layers in bytes, and compute with bytes: half the
            memory and up to twice the speed, for logits that differ by some percent. "int8" on the CPU, with native
            kernels, or on a GPU; "fp8" on a GPU that has it.
        attention_backend: what computes attention: "triton" on a GPU, "native" (compiled C++) on the CPU, "reference"
            (plain torch) on either; "auto" takes what is made for the device, and the reference for what that lacks.
        kv_cache_dtype: "fp8_e4m3" (or "fp8", the same) or "fp8_e5m2" to hold keys and values in eight bits: twice the
            tokens in the same memory, for logits that differ by some percent. "auto" holds them as they come. On the
            CPU the compiled decoder has to do without, which costs most of its speed.
        async_scheduling: schedule the next batch while one is computed. The tokens are the same; a request that comes
            meanwhile joins a step later.
        enforce_eager: on a GPU, launch every operation of a decode by itself instead of replaying CUDA graphs, whose
            capture takes seconds at the start, and memory. A deterministic engine, and a model that is not computed
            lean, do so anyway.
        enable_prompt_embeds: requests may give their prompts as embeddings. Off by default: they are input of another
            kind, from whoever may enqueue, that no tokenizer has limited to what the model was trained on.
        structured_outputs_backend: the library that constrains output to grammars, "xgrammar", "llguidance", or
            "auto": xgrammar, and llguidance for what it refuses. Loaded when the first request needs it.
        gpu_memory_utilization: share of the memory that is free after loading which the KV cache may take;
            None is 0.9 on a GPU and 0.4 on the CPU, where other programs live too.
        kv_cache_memory: bytes for the KV cache; overrides ``gpu_memory_utilization``.
        num_threads: threads that compute in a CPU engine; 0 chooses.
        num_engines_on_host: how many engines share the host's memory and cores.
        seed: for everything random that is not a request's own.
        deterministic: a request's logits have the same bits whatever is computed beside it and however it is cut up,
            so that another engine goes on with it on the same tokens. Holds between engines of the same build,
            device type, dtype and thread count, for models that are computed packed; see ops/decisions/0013.
        profile_dir: folder for traces of the torch profiler; "profiles" in Penstock's data folder when empty.
        dump_dir: folder for a file about each step that failed; only the log tells when empty.
        dump_prompts: tell the token ids of its requests, too.
        rpc_modules: Python modules whose ``@rpc_method`` functions ``collective_rpc`` may call.
    """

    model: str
    served_model_name: str = ""
    device: str = "cpu"
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    block_size: int = 16
    enable_prefix_caching: bool = True
    structured_outputs_backend: str = "xgrammar"
    gpu_memory_utilization: float | None = None
    kv_cache_memory: int | None = None
    num_threads: int = 0
    num_engines_on_host: int = 1
    seed: int = 0
    trust_remote_code: bool = False
    deterministic: bool = False
    profile_dir: str = ""
    dump_dir: str = ""
    dump_prompts: bool = False
    rpc_modules: tuple[str, ...] = ()
    enable_prompt_embeds: bool = False
    native_kernels: bool = True
    quantization: str | None = None
    async_scheduling: bool = False
    enforce_eager: bool = False
    attention_backend: str = "auto"
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigurationError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.load_format not in LOAD_FORMATS:
            raise ConfigurationError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {self.load_format!r}")
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise ConfigurationError(
                f"scheduling_policy must be one of {', '.join(SCHEDULING_POLICIES)}, got {self.scheduling_policy!r}"
            )
        if self.structured_outputs_backend not in STRUCTURED_OUTPUTS_BACKENDS:
            raise ConfigurationError(
                f"structured_outputs_backend must be one of {', '.join(STRUCTURED_OUTPUTS_BACKENDS)}, "
                f"got {self.structured_outputs_backend!r}"
            )
        self._check_quantization()
        self._check_attention()
        check_ranges(self, _ENGINE_RANGES)
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigurationError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token a step"
            )

    def _check_quantization(self) -> None:
        if self.quantization is None:
            return
        if self.quantization not in QUANTIZATIONS:
            raise ConfigurationError(
                f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {self.quantization!r}"
            )
        if self.device == "cpu" and self.quantization == "fp8":
            raise ConfigurationError("quantization 'fp8' needs a GPU (device 'cuda'); on the CPU there is 'int8'")
        if self.device == "cpu" and not self.native_kernels:
            raise ConfigurationError(f"quantization {self.quantization!r} needs native kernels on the CPU")

    def _check_attention(self) -> None:
        backend = self.attention_backend
        for name, known in (("attention_backend", ATTENTION_BACKENDS), ("kv_cache_dtype", KV_CACHE_DTYPES)):
            if getattr(self, name) not in known:
                raise ConfigurationError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if backend == "triton" and self.device != "cuda":
            raise ConfigurationError(
                "attention_backend 'triton' needs a GPU (device 'cuda'); on the CPU there are 'native' and 'reference'"
            )
        if backend != "native":
            return
        if self.device != "cpu" or not self.native_kernels:
            raise ConfigurationError("attention_backend 'native' needs device 'cpu' and native kernels")
        if self.deterministic or self.eight_bit_cache:
            option = "--deterministic" if self.deterministic else f"kv_cache_dtype {self.kv_cache_dtype!r}"
            raise ConfigurationError(f"attention_backend 'native' cannot do {option}; use 'auto' or 'reference'")

    @property
    def eight_bit_cache(self) -> str | None:
        """The full name of the floats of eight bits that keys and values are held in; None if they are not."""
        if self.kv_cache_dtype == "auto":
            return None
        return "fp8_e4m3" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def token_budget(self) -> int:
        """``max_num_batched_tokens``, or its default for this device and batch size."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_seqs, DEFAULT_TOKEN_BUDGET[self.device])

    def encode(self) -> bytes:
        """JSON bytes for ``Configure``."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> EngineConfig:
        """The inverse of ``encode``.

        Raises:
            ConfigurationError: a field is missing, unknown or of the wrong type.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"engine configuration: {error}") from error


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything one worker process needs; the supervisor writes it as the first line of its standard input.

    Args:
        worker_id: the supervisor's identity, shared by its engines.
        engine_id: this engine's identity: the consumer name in Redis and the key of its heartbeat.
        redis_url: where the broker is; may carry a password, hence not on the command line.
        visible_devices: value of CUDA_VISIBLE_DEVICES for the core; None leaves the environment alone.
        drain_timeout_s: how long running requests may go on after SIGTERM before they are handed back.
        lease_ttl_s: an engine that has not renewed its lease for so long counts as dead, whatever became of it.
        max_deliveries: a request that this many engines died on is parked.
        stall_timeout_s: an engine that has made no step, or a worker process that has said nothing, for so long is
            taken for hung and killed.
        num_restarts: how often this engine was started again.
        stream_interval_ms: the longest that output waits, under load, to be written together with what follows it;
            up to half a second where Redis is short of time; 0 writes as fast as Redis answers. First tokens and ends
            never wait.
        fork_server: socket of the process that forks engine cores; without one each is started by itself.
        log_requests: a line of the log at the end of each request, at level "info".
    """

    worker_id: str
    engine_id: str
    redis_url: str
    engine: EngineConfig
    namespace: str = "penstock"
    visible_devices: str | None = None
    supervisor_pid: int = 0
    drain_timeout_s: float = 30.0
    heartbeat_interval_s: float = 1.0
    heartbeat_ttl_s: float = 3.0
    lease_ttl_s: float = 3.0
    max_deliveries: int = 3
    stall_timeout_s: float = 10.0
    num_restarts: int = 0
    log_level: str = "info"
    log_format: str = "auto"
    stream_interval_ms: float = STREAM_INTERVAL_MS
    fork_server: str = ""
    log_requests: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, _WORKER_RANGES)

    @property
    def lease_ttl_ms(self) -> int:
        """``lease_ttl_s`` as the broker takes it."""
        return int(self.lease_ttl_s * 1000)

    @property
    def device_name(self) -> str:
        """What the engine runs on, for people: "cpu" or "cuda:0"."""
        return self.engine.device if self.visible_devices is None else f"cuda:{self.visible_devices}"
