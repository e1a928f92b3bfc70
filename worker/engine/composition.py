"""Builds an engine from its configuration. Only this module depends on all the parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import structlog
import torch

from ...kernels import native
from ...shared.errors import ConfigurationError
from ...shared.messages.core import Ready
from ...shared.params.kinds import GENERATE
from ...shared.params.sampling import SamplingParams
from ...shared.process.plugins import EXECUTORS, load_object
from ..config.engine_config import EngineConfig
from ..models.adapters.load import load_adapter
from ..models.adapters.slots import AdapterSlots
from ..models.attention.page_layout import PageLayout
from ..models.loaded import LoadedModel
from ..models.weights.movable import ModelWeights
from ..processes.progress import Phase, ProgressWriter
from .adapters.library import AdapterLibrary
from .control.calls import EngineControl
from .control.composition import compose_control
from .control.reload import WeightsSource
from .control.rpc_methods import load_rpc_methods
from .core.dump import StepDump
from .core.engine_core import EngineCore
from .drafting.drafters import SuffixMemory
from .drafting.speculation import NoMemory, Speculation
from .execution.batch import InputBatch
from .execution.free_rows import measure_free_rows
from .execution.input_embeds import embeds_hidden_size
from .execution.kv_cache import KVCacheSize
from .execution.model_runner import ModelRunner
from .images.admission import ImageAdmission
from .images.interface import Images, NoImages
from .keeper import inherited_model
from .logits_processors import load_logits_processors
from .offload.offload import KVOffload, make_offload
from .offload.request_loads import OffloadLoads
from .offload.transfers import OffloadingPrefixCache
from .own_ordering import load_ordering
from .ranks.interface import Ranks
from .ranks.memory import capture_next
from .ranks.one import OneRank
from .scheduling.admission import BlockLoads, NoLoads
from .scheduling.batches import Flights
from .scheduling.block_pool import BlockPool
from .scheduling.block_tables import BlockTables
from .scheduling.chunking import AnyChunks, Chunking, GeneratedTokensAlone, WholePrompts
from .scheduling.drafting import Drafting, NoDrafting
from .scheduling.ordering import OrderingPolicy
from .scheduling.prefix_cache import NoPrefixCache, PrefixCache
from .scheduling.request import ClockedTimeline, Request
from .scheduling.scheduler import Scheduler
from .setup.checks import check_options
from .setup.host import load_native_kernels, processor, set_loading_threads, store_triton_kernels
from .setup.layouts import choose_layout
from .setup.pages import allocate_caches, make_hash_cache, make_tables, size_caches
from .structured.admission import GrammarAdmission
from .structured.loader import load_backend

_VERSIONS = ("torch", "transformers")
# Of a cache for the warm-up alone, which uses a block of each group of layers.
_WARM_UP_BLOCKS = 64

log = structlog.get_logger(__name__)


@dataclass
class Engine:
    """A core that accepts requests, its control calls, and its description for the worker process."""

    core: EngineCore
    control: EngineControl
    ready: Ready

    runner: ModelRunner
    ranks: Ranks
    offload: KVOffload | None = None

    def close(self) -> None:
        """Write the pending KV blocks to the offload, and stop the other ranks."""
        if self.offload is not None:
            self.offload.close()
        self.ranks.close()


def make_ranks(config: EngineConfig, folder: Path) -> Ranks:
    """Return the ranks that compute the model in ``folder``; starts the processes of several ranks.

    Raises:
        ConfigurationError: the operator's executor cannot be loaded.
    """
    if config.executor:
        return load_object(EXECUTORS, config.executor)(config, folder)
    if config.num_ranks == 1:
        return OneRank(config, folder, inherited_model(config))
    # Imported late, because it imports transformers, which takes seconds.
    from .ranks.several import SeveralRanks

    return SeveralRanks(config, folder)


def build_engine(
    config: EngineConfig, folder: Path, progress: ProgressWriter | None = None, ranks: Ranks | None = None
) -> Engine:
    """Load the model in ``folder``, size and allocate the KV cache, and run one request to warm up.

    Args:
        ranks: the processes that compute the model; by default as many as ``config`` says.

    Raises:
        ConfigurationError, ModelLoadError: a setting or the model is not supported; the message names it.
    """
    if config.device == "cuda":
        store_triton_kernels()  # before ranks start, which inherit the setting
    ranks = ranks or make_ranks(config, folder)
    try:
        return _build(config, folder, progress or ProgressWriter(), ranks)
    except BaseException:
        ranks.close()
        raise


def _build(config: EngineConfig, folder: Path, progress: ProgressWriter, ranks: Ranks) -> Engine:
    rpc_methods = load_rpc_methods(config)
    processors = load_logits_processors(config.logits_processors)
    ordering = load_ordering(config.scheduling_policy)
    torch.manual_seed(config.seed)
    load_native_kernels(config)
    set_loading_threads(config)
    model = ranks.load(partial(progress.enter, Phase.STARTING))
    slots = ranks.attach_adapters() if config.enable_lora else None
    size = size_caches(config, model, ranks)
    check_options(config, model)
    hidden_size = embeds_hidden_size(model) if config.enable_prompt_embeds else None
    layout = choose_layout(config, model)
    runner = layout.make_runner(model, _make_batch(config, size), slots)
    allocate_cache = partial(allocate_caches, config, model, size, model.device)
    with progress.compiling():
        allocate_caches(config, model, size.limited(_WARM_UP_BLOCKS) if config.defers_cache else size, model.device)
        runner.warm_up(Request("warm-up", [0], SamplingParams(seed=0), max_model_len=size.max_model_len))
        drafting = _make_drafting(config, runner, size.max_model_len)
    flights = layout.make_flights(model, runner)
    blocks = _make_blocks(config, model, size, ranks)
    adapters = _make_library(config, slots)
    scheduler = _make_scheduler(config, model, size, blocks, ordering.policy, drafting, adapters, flights)
    source = WeightsSource.of(config, folder, model.folder)
    core = layout.make_core(model, runner, flights)(
        scheduler,
        runner,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        grammars=_grammar_admission(config, model, source),
        adapters=adapters,
        images=_image_admission(config, model, progress),
        dump=StepDump(config.dump_dir, shows_prompts=config.dump_prompts),
        embeds_hidden_size=hidden_size,
        processors=processors,
        rank=ordering.rank,
    )
    core.prepare_more = partial(capture_next, model, progress.compiling)
    parts = compose_control(
        config,
        source,
        model,
        size,
        core,
        runner,
        allocate_cache,
        rpc_methods,
        ranks,
        adapters,
        blocks.offload,
        report=partial(progress.enter, Phase.COMPILING),
    )
    control = layout.make_control(core, parts, progress)
    if model.expert_ranks is not None:
        model.expert_ranks.settle()
    ready = _ready(config, model, size, drafting.num_free_rows, processors.names)
    ready.weights_version, ready.ranks = control.weights_version, ranks.setup(size.num_blocks, size.pages)
    return Engine(core, control, ready, runner, ranks, blocks.offload)


def _make_drafting(config: EngineConfig, runner: ModelRunner, max_model_len: int) -> Drafting:
    """Measure how many rows of a step are free, and return the drafting. The caches must be allocated before."""
    if not config.max_draft_tokens:
        return NoDrafting()
    memory = SuffixMemory() if config.speculative.startswith("suffix") else NoMemory()
    limit = min(config.token_budget, max_model_len)
    num_free_rows = measure_free_rows(runner, limit, tries_all=config.is_grouped)
    return Speculation(config.max_draft_tokens, num_free_rows, memory)


def _is_encoder(model: LoadedModel) -> bool:
    return model.pooling is not None and model.pooling.is_encoder


def _make_library(config: EngineConfig, slots: AdapterSlots | None) -> AdapterLibrary[AdapterSlots] | None:
    if slots is None:
        return None
    folder = Path(config.lora_folder) if config.lora_folder else None
    return AdapterLibrary(slots, max_adapters=config.max_cpu_loras, folder=folder, load=load_adapter)


def _make_batch(config: EngineConfig, size: KVCacheSize) -> InputBatch:
    num_groups = None if size.pages is None else len(size.pages.windows)
    return InputBatch(config.max_num_seqs, size.max_model_len, config.block_size, num_groups)


def _token_budget(config: EngineConfig, model: LoadedModel, size: KVCacheSize) -> int:
    """Return the maximum number of tokens in a step, which for an encoder is at least one whole text."""
    return max(config.token_budget, size.max_model_len) if _is_encoder(model) else config.token_budget


def _make_chunking(config: EngineConfig, model: LoadedModel, size: KVCacheSize) -> Chunking:
    if _is_encoder(model):
        return WholePrompts(model.enough_tokens)
    if model.pooling is not None or not model.computes_single_tokens_differently:
        return AnyChunks()
    if _token_budget(config, model, size) < GeneratedTokensAlone.MIN_BUDGET:
        raise ConfigurationError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, and prompts of {model.architecture} are cut "
            f"into chunks of several tokens; give {GeneratedTokensAlone.MIN_BUDGET} or more"
        )
    return GeneratedTokensAlone()


@dataclass(frozen=True)
class _Blocks:
    """The blocks of the KV cache, and the parts that assign, share, offload and load them."""

    pool: BlockPool
    tables: BlockTables
    prefix_cache: PrefixCache
    offload: KVOffload | None
    loads: BlockLoads


def _make_blocks(config: EngineConfig, model: LoadedModel, size: KVCacheSize, ranks: Ranks) -> _Blocks:
    """Return the blocks of the KV cache, which is allocated."""
    pool = BlockPool(size.num_blocks, config.block_size)
    tables = make_tables(config, size.pages, pool)
    offload = make_offload(config, pool, ranks.device_blocks, ranks.block_identity)
    prefix_cache = _make_prefix_cache(config, model, size.pages, pool, offload)
    if offload is None:
        return _Blocks(pool, tables, prefix_cache, None, NoLoads())
    loads = OffloadLoads(offload, int(config.looks_ahead), pool, prefix_cache, config.max_num_seqs)
    return _Blocks(pool, tables, prefix_cache, offload, loads)


def _make_scheduler(
    config: EngineConfig,
    model: LoadedModel,
    size: KVCacheSize,
    blocks: _Blocks,
    policy: OrderingPolicy,
    drafting: Drafting,
    adapters: AdapterLibrary[AdapterSlots] | None,
    flights: Flights,
) -> Scheduler:
    return Scheduler(
        blocks.pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=_token_budget(config, model, size),
        max_model_len=size.max_model_len,
        policy=policy,
        prefix_cache=blocks.prefix_cache,
        timeline=ClockedTimeline(),
        drafting=drafting,
        residency=adapters,
        flights=flights,
        tables=blocks.tables,
        chunking=_make_chunking(config, model, size),
        loads=blocks.loads,
    )


def _make_prefix_cache(
    config: EngineConfig,
    model: LoadedModel,
    pages: PageLayout | None,
    block_pool: BlockPool,
    offload: KVOffload | None,
) -> PrefixCache:
    if _is_encoder(model):
        return NoPrefixCache()
    if offload is not None:
        return OffloadingPrefixCache(block_pool, offload.write_behind)
    if config.enable_prefix_caching and model.forward.keeps_state:
        # A shared prefix would need the model's state, too, which is not stored in blocks.
        log.info("no_prefix_caching", architecture=model.architecture, reason="its requests have states")
    elif config.enable_prefix_caching:
        return make_hash_cache(config, pages, block_pool)
    return NoPrefixCache()


def _grammar_admission(config: EngineConfig, model: LoadedModel, source: WeightsSource) -> GrammarAdmission:
    name, vocab_size = config.structured_outputs_backend, model.vocab_size
    return GrammarAdmission(
        lambda: load_backend(name, source.tokenizer_folder, vocab_size, model.eos_token_ids),
        vocab_size=vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def _image_admission(config: EngineConfig, model: LoadedModel, progress: ProgressWriter) -> Images:
    if model.vision is None:
        return NoImages(model.image_refusal)
    return ImageAdmission(
        model.vision,
        max_images=min(config.max_images, model.vision.max_images),
        cache_bytes=config.image_cache_memory,
        busy=progress.compiling,
    )


@cache
def _versions() -> dict[str, str]:
    """Return the versions of the libraries that compute.

    Cached, because each lookup searches a folder of hundreds of packages.
    """
    return {name: metadata.version(name) for name in _VERSIONS}


def _ready(
    config: EngineConfig,
    model: LoadedModel,
    size: KVCacheSize,
    num_free_rows: int,
    logits_processors: tuple[str, ...],
) -> Ready:
    dtype = str(model.dtype).removeprefix("torch.")
    name, instructions = processor(config.device)
    library = native.loaded()
    return Ready(
        model_folder=str(model.folder),
        architecture=model.architecture,
        max_model_len=size.max_model_len,
        num_blocks=size.num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        device=config.device,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        num_parameters=model.num_parameters,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=_token_budget(config, model, size),
        kv_cache_size_tokens=size.num_tokens,
        attention_backend=model.attention_backend,
        kv_cache_dtype=config.eight_bit_cache or dtype,
        processor=name,
        instructions=instructions,
        kernel_instructions="" if library is None else library.instructions,
        versions=_versions(),
        quantization=model.quantization or "",
        scheduling_policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=config.looks_ahead,
        structured_outputs_backend=config.structured_outputs_backend,
        supported_tasks=(GENERATE,) if model.pooling is None else model.pooling.tasks,
        pooling=None if model.pooling is None else model.pooling.setup,
        lora=config.lora_setup,
        speculative=config.speculative,
        num_free_rows=num_free_rows,
        max_images=0 if model.vision is None else min(config.max_images, model.vision.max_images),
        image_refusal=model.image_refusal,
        logits_processors=logits_processors,
        num_shared_experts=model.num_experts,
        weight_bytes=ModelWeights(model.weights, lambda: model.weights).num_bytes if config.num_ranks == 1 else 0,
        kv_cache_bytes=size.num_blocks * size.block_bytes + size.state_bytes if config.num_ranks == 1 else 0,
    )
