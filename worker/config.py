"""The configuration of one engine: written once from its options, frozen, sent to the core as JSON.

A field with an ``Option`` is what people set, by the command line, the environment or a file; the option's text says
what the field means.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..shared.errors import ConfigurationError
from ..shared.keys import is_partition_name
from .adapter_options import check_adapters
from .config_checks import check_attention, check_engine, check_quantization, check_speculation
from .data_parallel_options import DataParallelOptions, check_data_parallel
from .image_options import DEFAULT_CACHE_MEMORY, DEFAULT_MAX_IMAGES, ImageCacheMemory, MaxImages
from .kv_offload_options import check_kv_offload
from .options.option import Option, check_fields
from .options.readers import Choice, ChoiceWithCount, Folder, Integer, Model, Reader, Share, Size, Switch, Texts
from .ordering_options import SchedulingPolicy
from .rank_options import check_ranks

# Of one step. On the CPU a step with a larger share of prefill holds up everybody's next token (135M Llama: inter-token
# p99 3.5 s with 2048, 0.6 s with 256, at the same throughput).
DEFAULT_TOKEN_BUDGET = {"cpu": 512, "cuda": 2048}
# Of the memory that is free after loading. On the CPU other programs live, too.
DEFAULT_MEMORY_UTILIZATION = {"cpu": 0.4, "cuda": 0.9}
# Guesses of a request in a step, beyond which none is made, and without a number behind `ngram`: with the known token
# a tile of 16 rows.
MAX_DRAFT_TOKENS, DEFAULT_DRAFT_TOKENS = 64, 15
# The program of an engine's core, by what `--engine` calls it.
CORE_MODULES = {
    "penstock": "penstock.worker.engine",
    "vllm": "penstock.worker.engines.vllm",
    "http": "penstock.worker.engines.http",
}
# What no machine has, and no deployment means. Beyond it arrays are made that do not fit, or processes without end.
MAX_ENGINES_ON_HOST = 1024

# Headings of the help.
MODEL, PLACE, BATCH, COMPUTING, CONTROL = (
    "model",
    "where",
    "what an engine takes",
    "how it computes",
    "control and diagnosis",
)


class EngineConfig(DataParallelOptions, frozen=True, kw_only=True, omit_defaults=True):
    """How an engine core loads its model and schedules.

    Args:
        num_engines_on_host: how many engines share the host's memory and cores.
    """

    model: Annotated[str, Option("model folder, .gguf file, or name on the hub", Model(), group=MODEL)]
    served_model_name: Annotated[
        str, Option("what clients call it", Reader("NAME"), default="the last part of `model`", group=MODEL)
    ] = ""
    engine: Annotated[
        str,
        Option(
            "what computes: Penstock's own engine, vLLM's in the environment of --engine-python, or the server at "
            "--engine-url",
            Choice(*CORE_MODULES),
            group=MODEL,
        ),
    ] = "penstock"
    engine_python: Annotated[
        str,
        Option("the Python that has vLLM and penstock", Reader("FILE"), default="the one that runs this", group=MODEL),
    ] = ""
    engine_options: Annotated[
        str,
        Option(
            "options of `vllm serve` for its engine, in quotes; they win over those here",
            Reader("WORDS"),
            default="none",
            group=MODEL,
        ),
    ] = ""
    engine_url: Annotated[
        str,
        Option("address of a llama-server or an SGLang server", Reader("URL"), default="none", group=MODEL),
    ] = ""
    engine_command: Annotated[
        str,
        Option(
            "the words that start that server, in quotes, where the worker is to start it and to end it",
            Reader("WORDS"),
            default="none",
            group=MODEL,
        ),
    ] = ""
    dtype: Annotated[
        str,
        Option(
            "what is computed in; auto: as the weights were saved",
            Choice("auto", "float32", "bfloat16", "float16"),
            group=MODEL,
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        Option(
            "dummy reads no weights, but draws random ones on the device, for benchmarks; sharded_state is auto by "
            "vLLM's name for a folder that save_sharded_state wrote",
            Choice("auto", "dummy", "sharded_state"),
            group=MODEL,
        ),
    ] = "auto"
    trust_remote_code: Annotated[bool, Option("run code that comes with the model", Switch(), group=MODEL)] = False
    runner: Annotated[
        str,
        Option(
            "what the model is for: generate, or pooling (embeddings, classes, scores); auto: as its files say",
            Choice("auto", "generate", "pooling"),
            group=MODEL,
        ),
    ] = "auto"

    device: Annotated[
        str, Option("cpu, or cuda: a visible GPU for each rank of an engine", Choice("cpu", "cuda"), group=PLACE)
    ] = "cpu"
    num_threads: Annotated[
        int,
        Option("threads of each CPU engine; 0 chooses", Integer(0, 1024, "0 chooses"), name="threads", group=PLACE),
    ] = 0
    num_engines_on_host: Annotated[int, Integer(1, MAX_ENGINES_ON_HOST)] = 1

    max_model_len: Annotated[
        int | None,
        Option(
            "most prompt plus output tokens of a request",
            Integer(2, (1 << 31) - 1, "a request has a prompt and an output token, and positions 32 bits"),
            default="the model's own limit",
            group=BATCH,
        ),
    ] = None
    max_num_seqs: Annotated[int, Option("most requests in one batch", Integer(1, 65_536), group=BATCH)] = 64
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "token budget of one step; longer prompts are prefilled in chunks",
            Integer(1, 1 << 20),
            default="{cpu} on the CPU, {cuda} on a GPU".format_map(DEFAULT_TOKEN_BUDGET),
            group=BATCH,
        ),
    ] = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    block_size: Annotated[int, Option("tokens per KV-cache block", Integer(1, 65_536), group=BATCH)] = 16
    enable_prefix_caching: Annotated[
        bool,
        Option(
            "do not compute again what the beginning of another request of the same tenant has left in the KV cache",
            Switch(),
            group=BATCH,
        ),
    ] = True
    gpu_memory_utilization: Annotated[
        float | None,
        Option(
            "share of the memory that is free after loading which the KV cache may take",
            Share(),
            default="{cpu} on the CPU, {cuda} on a GPU".format_map(DEFAULT_MEMORY_UTILIZATION),
            group=BATCH,
        ),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        Option(
            "memory of the KV cache, on each rank; instead of a share",
            Size(1, 1 << 50),
            default="the share",
            group=BATCH,
        ),
    ] = None
    # Off by default: they are input of another kind, from whoever may enqueue, that no tokenizer has limited to what
    # the model was trained on.
    enable_prompt_embeds: Annotated[
        bool, Option("take prompts that are given as embeddings, too", Switch(), group=BATCH)
    ] = False
    max_images: MaxImages = DEFAULT_MAX_IMAGES
    image_cache_memory: ImageCacheMemory = DEFAULT_CACHE_MEMORY
    structured_outputs_backend: Annotated[
        str,
        Option(
            "the library that holds outputs to JSON schemas and other grammars; auto: xgrammar, and llguidance for "
            "what it refuses",
            Choice("xgrammar", "llguidance", "auto"),
            group=BATCH,
        ),
    ] = "xgrammar"

    seed: Annotated[
        int, Option("for what is random and no request's own", Integer(0, (1 << 63) - 1), group=COMPUTING)
    ] = 0
    deterministic: Annotated[
        bool,
        Option(
            "a request gets the same tokens in any company and on any equal engine that resumes it; slower",
            Switch(),
            group=COMPUTING,
        ),
    ] = False
    native_kernels: Annotated[
        bool,
        Option(
            "on the CPU, compile kernels for this processor at the first start, if there is a compiler",
            Switch(),
            group=COMPUTING,
        ),
    ] = True
    quantization: Annotated[
        str | None,
        Option(
            "hold the weights of linear layers in bytes or four bits: faster, for logits that differ by some percent "
            "(four bits: by more); int4 on the CPU, fp8 on a GPU",
            Choice("int8", "int4", "fp8"),
            group=COMPUTING,
        ),
    ] = None
    async_scheduling: Annotated[
        bool,
        Option(
            "schedule the next batch while one is computed: the same tokens, for large batches of small models",
            Switch(),
            group=COMPUTING,
        ),
    ] = False
    speculative: Annotated[
        str,
        Option(
            "guess several tokens of a request and verify them in one step, where a step has room: the same tokens, "
            f"sooner; ngram: at most N (default {DEFAULT_DRAFT_TOKENS}) that followed its last tokens before, were "
            "predicted, or are forced by a grammar; suffix: also what other requests of its tenant and salt have said",
            ChoiceWithCount("off", "ngram", "suffix", counted=("ngram", "suffix"), most=MAX_DRAFT_TOKENS),
            group=COMPUTING,
        ),
    ] = "off"
    # A capture of graphs takes seconds at the start, and memory.
    enforce_eager: Annotated[
        bool,
        Option(
            "on a GPU, capture no CUDA graphs: a quicker start and less memory, for slower decodes",
            Switch(),
            group=COMPUTING,
        ),
    ] = False
    attention_backend: Annotated[
        str,
        Option(
            "what computes attention: triton on a GPU, native (compiled) on the CPU, reference (torch) anywhere; auto: "
            "what is made for the device, and the reference for what that lacks",
            Choice("auto", "triton", "native", "reference"),
            group=COMPUTING,
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        Option(
            "hold keys and values in eight bits: twice the tokens in the same memory, for logits that differ by some "
            "percent, and on the CPU several times slower; fp8 is fp8_e4m3; auto: as they come",
            Choice("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
            group=COMPUTING,
        ),
    ] = "auto"

    profile_dir: Annotated[
        str,
        Option("for traces of the torch profiler", Folder(), default="`profiles` in the data folder", group=CONTROL),
    ] = ""
    dump_dir: Annotated[str, Option("for a file about each step that failed", Folder(), group=CONTROL)] = ""
    dump_prompts: Annotated[
        bool, Option("tell the token ids of its requests in there, too", Switch(), group=CONTROL)
    ] = False
    rpc_modules: Annotated[
        tuple[str, ...],
        Option(
            "Python module whose @rpc_method functions clients may call in the engine; may be given several times",
            Texts("MODULE"),
            name="rpc_module",
            group=CONTROL,
        ),
    ] = ()

    logits_processors: Annotated[
        tuple[str, ...],
        Option(
            "logits processor that requests may choose by name: MODULE:CLASS, or the name of an installed plug-in; may "
            "be given several times",
            Texts("PROCESSOR"),
            group=CONTROL,
        ),
    ] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if is_partition_name(self.model_name):
            raise ConfigurationError(
                f"served_model_name must not end in '#' and a number, as partitions do, got {self.model_name!r}"
            )
        check_engine(
            self.engine,
            engine_python=self.engine_python,
            engine_options=self.engine_options,
            engine_url=self.engine_url,
            engine_command=self.engine_command,
        )
        check_quantization(self.quantization, self.device, native_kernels=self.native_kernels)
        check_attention(
            self.attention_backend,
            self.device,
            native_kernels=self.native_kernels,
            deterministic=self.deterministic,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        check_adapters(self, self.engine)
        check_speculation(self.speculative, self.engine, async_scheduling=self.async_scheduling)
        check_kv_offload(self, enable_prefix_caching=self.enable_prefix_caching)
        check_ranks(self, self.engine, async_scheduling=self.async_scheduling)
        check_data_parallel(
            self,
            self.engine,
            self.device,
            deterministic=self.deterministic,
            async_scheduling=self.async_scheduling,
            speculative=self.speculative,
            enforce_eager=self.enforce_eager,
        )
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token a step"
            )

    @property
    def eight_bit_cache(self) -> str | None:
        """The full name of the floats of eight bits that keys and values are held in; None if they are not."""
        if self.kv_cache_dtype == "auto":
            return None
        return "fp8_e4m3" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype

    @property
    def max_draft_tokens(self) -> int:
        """Most guesses of a request in a step; 0 where nothing is guessed."""
        word, _, count = self.speculative.partition(":")
        return 0 if word == "off" else int(count or DEFAULT_DRAFT_TOKENS)

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def needs_weights(self) -> bool:
        """Whether they are read from the model's folder."""
        return self.load_format != "dummy"

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
