"""The card of a served model, which clients read."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

from ....shared.deployment.records import EngineSetup, ModelCard
from ....shared.messages.core import Ready
from ....shared.params.sampling import SamplingParams
from ....shared.values.distribution import VERSION
from ...config.engine_config import EngineConfig
from ...text.tokenizer import TextCodec

# Fields of generation_config.json that a caller can set in SamplingParams.
_RECOMMENDED = frozenset({"do_sample", "max_new_tokens", "eos_token_id", *SamplingParams.__struct_fields__})


def make_card(config: EngineConfig, ready: Ready, codec: TextCodec, *, is_tracing_enabled: bool = False) -> ModelCard:
    """Return the card of a model that has just been loaded."""
    return ModelCard(
        model=config.model_name,
        architecture=ready.architecture,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        dtype=ready.dtype,
        quantization=ready.quantization,
        attention_backend=ready.attention_backend,
        kv_cache_dtype=ready.kv_cache_dtype,
        eos_token_ids=ready.eos_token_ids,
        has_chat_template=codec.has_chat_template,
        generation_config=_generation_config(Path(ready.model_folder)),
        tool_call_parser=codec.chat_style.tool_call_parser,
        reasoning_parser=codec.chat_style.reasoning_parser,
        tool_call_source=codec.chat_style.tool_call_source,
        system_anywhere=codec.has_chat_template and codec.roles.system_anywhere,
        takes_developer=codec.roles.developer,
        supported_tasks=ready.supported_tasks,
        pooling=ready.pooling,
        is_tracing_enabled=is_tracing_enabled,
        registered_at=time.time(),
        setup=_setup(config, ready),
        logits_processors=ready.logits_processors,
        max_images=ready.max_images,
        image_refusal=ready.image_refusal,
        weights_version=ready.weights_version,
        thinks_before_grammar=codec.can_think_first and ready.engine == "penstock",
    )


def _setup(config: EngineConfig, ready: Ready) -> EngineSetup:
    return EngineSetup(
        max_model_len=ready.max_model_len,
        max_num_seqs=ready.max_num_seqs,
        max_num_batched_tokens=ready.max_num_batched_tokens,
        block_size=ready.block_size,
        kv_cache_size_tokens=ready.kv_cache_size_tokens,
        scheduling_policy=ready.scheduling_policy,
        enable_prefix_caching=ready.enable_prefix_caching,
        async_scheduling=ready.async_scheduling,
        deterministic=config.deterministic,
        dtype=ready.dtype,
        kv_cache_dtype=ready.kv_cache_dtype,
        quantization=ready.quantization,
        attention_backend=ready.attention_backend,
        structured_outputs_backend=ready.structured_outputs_backend,
        native_kernels=bool(ready.kernel_instructions),
        num_threads=config.num_threads,
        processor=ready.processor,
        instructions=ready.instructions,
        kernel_instructions=ready.kernel_instructions,
        versions={"python": platform.python_version(), "penstock": VERSION, **ready.versions},
        engine=ready.engine,
        resume=ready.resume,
        lora=ready.lora,
        speculative=ready.speculative,
        num_free_rows=ready.num_free_rows,
        ranks=ready.ranks,
        weight_bytes=ready.weight_bytes,
        kv_cache_bytes=ready.kv_cache_bytes,
    )


def _generation_config(folder: Path) -> dict[str, Any]:
    """Return the recommendations of a model folder; empty if its file is missing or invalid."""
    try:
        recommended = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(recommended, dict):
        return {}
    return {name: value for name, value in recommended.items() if name in _RECOMMENDED and value is not None}
