# pyright: reportMissingImports=false
# (vLLM is installed in a separate environment.)
"""Build vLLM's engine core as vLLM's own server does, and the ``Engine`` around it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog

from ....shared.errors import ConfigurationError
from ....shared.messages.core import Ready
from ...config.engine_config import EngineConfig
from ...engine.scheduling.request import Request
from ...models.checkpoint.folder import resolve_model_folder
from ...models.checkpoint.tokenizer_folder import tokenizer_folder
from ...processes.host import usable_cores
from ...processes.progress import ProgressWriter
from .adapters import adapter_of, make_library
from .control import VllmControl
from .conversion import RESUME
from .core import VllmCore
from .options import lora_setup, vllm_environment, vllm_words
from .pooling import VllmPoolingCore, VllmPoolingRequests, pooling_setup, served_pooling_tasks
from .versions import installed_version
from .vllm_request import VllmRequests
from .warm_up import generation_batches, pooling_batches, warm_up

_VERSIONS = ("torch", "transformers")

log = structlog.get_logger(__name__)


@dataclass
class VllmEngine:
    """Implementation of ``worker.core.interface.Engine``."""

    core: VllmCore
    control: VllmControl
    ready: Ready
    engine: Any

    def close(self) -> None:
        """End vLLM's processes, if it has any."""
        self.engine.shutdown()


def build_engine(config: EngineConfig, progress: ProgressWriter) -> VllmEngine:
    """Load the model as vLLM does.

    Raises:
        ConfigurationError, ModelLoadError: an option, the model's folder or vLLM's version does not fit; names which.
    """
    version = installed_version()
    folder = resolve_model_folder(config.model, needs_weights=config.needs_weights)
    os.environ.update(vllm_environment(config, os.environ, usable_cores()))
    # Imported here, because vLLM takes seconds to import and reads its environment then.
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.executor import Executor

    is_local = Path(config.model).expanduser().is_dir()
    vllm_config = _vllm_config(config, str(folder) if is_local else config.model)
    engine = EngineCore(
        vllm_config, Executor.get_class(vllm_config), log_stats=True, executor_fail_callback=_exit_broken
    )
    inputs = InputProcessor(vllm_config)
    eos_token_ids = _eos_token_ids(inputs)
    ready = _ready(config, vllm_config, version, eos_token_ids)
    ready.model_folder = str(tokenizer_folder(folder, config.trust_remote_code))
    library = make_library(config, engine)
    ready.lora = lora_setup(config)
    options: dict[str, Any] = {
        "adapters": library,
        "max_model_len": ready.max_model_len,
        "eos_token_ids": eos_token_ids,
        "is_on_gpu": config.device == "cuda",
    }
    if vllm_config.model_config.runner_type == "pooling":
        core = _pooling_core(engine, inputs, folder, ready, adapter_of(library), options)
        warm_up(core, pooling_batches(ready.supported_tasks))
    else:
        core = VllmCore(engine, VllmRequests(engine, inputs, adapter_of(library)), **options)
        warm_up(core, generation_batches(has_adapters=config.enable_lora))
    return VllmEngine(core, VllmControl(engine, core, progress, library), ready, engine)


def _pooling_core(
    engine: Any,
    inputs: Any,
    folder: Path,
    ready: Ready,
    adapter_of_request: Callable[[Request], Any],
    options: dict[str, Any],
) -> VllmPoolingCore:
    """Return the core of a model that pools, and describe the model in ``ready``."""
    tasks = served_pooling_tasks(engine)
    ready.supported_tasks, ready.pooling = tasks, pooling_setup(inputs.model_config, tasks, folder)
    if not engine.scheduler.kv_cache_config.kv_cache_groups:
        # An encoder keeps nothing, so only the number of its requests is limited.
        ready.kv_cache_size_tokens = ready.max_num_seqs * ready.max_model_len
    requests = VllmPoolingRequests(tasks, engine, inputs, adapter_of_request)
    return VllmPoolingCore(tasks, ready.pooling, engine, requests, **options)


def _vllm_config(config: EngineConfig, model: str) -> Any:
    """Return vLLM's configuration from our options and vLLM's own, with the defaults of its server."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMError
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if current_platform.device_type != config.device:
        raise ConfigurationError(
            f"device {config.device!r}: the vLLM of {sys.executable} computes on {current_platform.device_type!r}"
        )

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:
            raise ConfigurationError(f"engine_options: {message}")

    parser = EngineArgs.add_cli_args(Parser(add_help=False))
    arguments = EngineArgs.from_cli_args(parser.parse_args(vllm_words(config, model)))
    try:
        vllm_config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, TypeError, VLLMError) as error:  # of its own checks and of pydantic's
        raise ConfigurationError(f"vLLM refuses its configuration: {error}") from error
    # Apply grammars from the first token on, whatever parser is configured.
    vllm_config.structured_outputs_config.enable_in_reasoning = True
    return vllm_config


def _eos_token_ids(inputs: Any) -> list[int]:
    """Return the end-of-sequence tokens: that of the tokenizer, and those of the generation config."""
    configured = inputs.generation_config_fields.get("eos_token_id")
    ids = {configured} if isinstance(configured, int) else set(configured or ())
    return sorted(ids | ({inputs.renderer.get_eos_token_id()} - {None}))


def _ready(config: EngineConfig, vllm_config: Any, version: str, eos_token_ids: list[int]) -> Ready:
    model, cache, scheduler = vllm_config.model_config, vllm_config.cache_config, vllm_config.scheduler_config
    dtype = str(model.dtype).removeprefix("torch.")
    return Ready(
        model_folder="",
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        num_blocks=cache.num_gpu_blocks,
        block_size=cache.block_size,
        dtype=dtype,
        device=config.device,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=eos_token_ids,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        # vLLM reserves one block; models with several kinds of caches report the size.
        kv_cache_size_tokens=cache.kv_cache_size_tokens or (cache.num_gpu_blocks - 1) * cache.block_size,
        attention_backend="vllm",
        kv_cache_dtype=dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        processor=_processor(),
        engine="vllm",
        resume=RESUME,
        versions={"vllm": version, **{name: metadata.version(name) for name in _VERSIONS}},
        quantization=str(model.quantization or ""),
        scheduling_policy=str(scheduler.policy),
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        async_scheduling=bool(scheduler.async_scheduling),
        structured_outputs_backend=str(vllm_config.structured_outputs_config.backend),
    )


def _processor() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())


def _exit_broken() -> None:
    """Exit immediately after the death of one of vLLM's processes, so that the worker process notices it."""
    log.error("vllm_process_died")
    os._exit(1)
