"""Options for an engine's batch: limits of requests, tokens and KV cache, images, and the order of requests."""

from __future__ import annotations

from typing import Annotated

from ...shared.params.images import MAX_IMAGES
from ...shared.process.plugins import ORDERING_POLICIES, plugins_of
from ..options.numbers import Integer, Share, Size
from ..options.option import Option, OptionGroup
from ..options.readers import Choice, RefusedValueError, Switch

BATCH = "batch and memory"
# Tokens of one step. On the CPU a step with more prefill delays the next token of all requests (135M Llama: inter-token
# p99 3.5 s with 2048, 0.6 s with 256, at the same throughput).
DEFAULT_TOKEN_BUDGET = {"cpu": 512, "cuda": 2048}
# Share of the memory that is free after loading. On the CPU it is lower, because other programs use the memory too.
DEFAULT_MEMORY_UTILIZATION = {"cpu": 0.4, "cuda": 0.9}
DEFAULT_MAX_IMAGES = 8
DEFAULT_CACHE_MEMORY = 512 << 20

MaxImages = Annotated[
    int,
    Option(
        "maximum images per request of a vision model; 0 accepts none and does not load the vision encoder",
        Integer(0, MAX_IMAGES, "0 takes none"),
        group=BATCH,
    ),
]
ImageCacheMemory = Annotated[
    int,
    Option(
        "memory that caches repeated images: half for processed images, half for features of the vision encoder",
        Size(0, 1 << 50),
        default="512MiB",
        group=BATCH,
    ),
]
FIRST_COME_FIRST_SERVED = "fcfs"
SCHEDULING_POLICIES = (FIRST_COME_FIRST_SERVED, "priority")


class _Policy(Choice):
    """Reader of a policy of the project or of the operator. The latter is checked when an engine loads it."""

    def __init__(self) -> None:
        super().__init__(*SCHEDULING_POLICIES)
        self.metavar = "POLICY"
        self.kind += ", a plug-in's name, `MODULE:CLASS`"

    def check(self, value: str) -> None:
        if ":" in value or value in SCHEDULING_POLICIES:
            return
        installed = plugins_of(ORDERING_POLICIES)
        if value not in installed:
            names = ", ".join((*SCHEDULING_POLICIES, *installed))
            raise RefusedValueError(f"must be one of {names}, or MODULE:CLASS")


SchedulingPolicy = Annotated[
    str,
    Option(
        "order in which an engine runs requests, and the reverse order of preemption: arrival, lowest "
        "priority then arrival, or a custom policy",
        _Policy(),
        group=BATCH,
    ),
]


class BatchOptions(OptionGroup):
    """Limits of requests and tokens, their kinds and their order."""

    max_model_len: Annotated[
        int | None,
        Option(
            "maximum prompt plus output tokens of a request",
            Integer(2, (1 << 31) - 1, "a request has a prompt and an output token, and positions 32 bits"),
            default="the model's own limit",
            group=BATCH,
        ),
    ] = None
    max_num_seqs: Annotated[int, Option("maximum requests in one batch", Integer(1, 65_536), group=BATCH)] = 64
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
            "reuse KV-cache blocks of a common prefix with another request of the same tenant",
            Switch(),
            group=BATCH,
        ),
    ] = True
    gpu_memory_utilization: Annotated[
        float | None,
        Option(
            "share of the memory that is free after loading, for the KV cache",
            Share(),
            default="{cpu} on the CPU, {cuda} on a GPU".format_map(DEFAULT_MEMORY_UTILIZATION),
            group=BATCH,
        ),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        Option(
            "memory of the KV cache on each rank, instead of a share",
            Size(1, 1 << 50),
            default="by share",
            group=BATCH,
        ),
    ] = None
    # Off by default, because any client may send them, and no tokenizer restricts them to
    # inputs of the model's training.
    enable_prompt_embeds: Annotated[bool, Option("accept prompts of embeddings, too", Switch(), group=BATCH)] = False
    max_images: MaxImages = DEFAULT_MAX_IMAGES
    image_cache_memory: ImageCacheMemory = DEFAULT_CACHE_MEMORY
    structured_outputs_backend: Annotated[
        str,
        Option(
            "library that enforces JSON schemas and other grammars; auto: xgrammar, and llguidance for those it "
            "refuses",
            Choice("xgrammar", "llguidance", "auto"),
            group=BATCH,
        ),
    ] = "xgrammar"
