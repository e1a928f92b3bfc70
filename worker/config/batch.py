"""Limits of an engine's batch: requests, tokens of a step, KV cache."""

from __future__ import annotations

from typing import Annotated

from ..options.groups import OptionGroup
from ..options.numbers import Integer, Share, Size
from ..options.option import Option
from ..options.readers import Choice, Switch
from .images import DEFAULT_CACHE_MEMORY, DEFAULT_MAX_IMAGES, ImageCacheMemory, MaxImages
from .ordering import SchedulingPolicy

BATCH = "batch and memory"
# Tokens of one step. On the CPU a step with more prefill delays the next token of all requests (135M Llama: inter-token
# p99 3.5 s with 2048, 0.6 s with 256, at the same throughput).
DEFAULT_TOKEN_BUDGET = {"cpu": 512, "cuda": 2048}
# Share of the memory that is free after loading. On the CPU it is lower, because other programs use the memory too.
DEFAULT_MEMORY_UTILIZATION = {"cpu": 0.4, "cuda": 0.9}


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
