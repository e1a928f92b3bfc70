"""Options of ``worker start`` that are passed to vLLM, as options of its command line; the others are refused."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import msgspec

from ....shared.errors import ConfigurationError
from ....shared.params.lora import LoraSetup
from ....shared.values.shown import shown
from ...config.batch import SCHEDULING_POLICIES
from ...config.checks import check_supported
from ...config.engine_config import EngineConfig

# Always passed, because vLLM's defaults differ.
_ALWAYS = {"dtype": "--dtype", "load_format": "--load-format", "max_num_seqs": "--max-num-seqs", "seed": "--seed"}
# Passed if they differ from our default, which leaves the choice to vLLM.
_WHEN_GIVEN = {
    "max_model_len": "--max-model-len",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "scheduling_policy": "--scheduling-policy",
    "runner": "--runner",
    "block_size": "--block-size",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "kv_cache_memory": "--kv-cache-memory-bytes",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
}
_SWITCHES = {
    "trust_remote_code": "--trust-remote-code",
    "enforce_eager": "--enforce-eager",
    "async_scheduling": "--async-scheduling",
    "enable_expert_parallel": "--enable-expert-parallel",
}
# Fields that this adapter or the worker process handles, or that are not options.
_OWN = frozenset(
    {
        "model",
        "served_model_name",
        "engine",
        "engine_python",
        "engine_options",
        "device",
        "num_threads",
        "num_engines_on_host",
        "enable_prefix_caching",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "lora_folder",
        "profile_dir",
    }
)
SUPPORTED_OPTIONS = _OWN | _ALWAYS.keys() | _WHEN_GIVEN.keys() | _SWITCHES.keys()
_INSTEAD = {
    "quantization": "--quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "attention_backend": "--attention-backend",
    "structured_outputs_backend": "--structured-outputs-config.backend",
}


def check_options(config: EngineConfig) -> None:
    """Refuse options that do not apply to vLLM.

    Raises:
        ConfigurationError: one is not at its default, or ``engine_options`` cannot be read; names it and the remedy.
    """
    instead = {name: f"use vLLM's own {flag} in --engine-options" for name, flag in _INSTEAD.items()}
    check_supported(config, "vllm", SUPPORTED_OPTIONS, instead)
    if config.scheduling_policy not in SCHEDULING_POLICIES:
        raise ConfigurationError(
            f"scheduling_policy {shown(config.scheduling_policy)} is for Penstock's engine, not for 'vllm'; it has "
            f"{' and '.join(SCHEDULING_POLICIES)}"
        )
    own_words(config)


def own_words(config: EngineConfig) -> list[str]:
    """Return the words of ``engine_options``. Raises ``ConfigurationError`` if a quote in them does not end."""
    try:
        return shlex.split(config.engine_options)
    except ValueError as error:
        raise ConfigurationError(
            f"engine_options cannot be read: {error}, got {shown(config.engine_options)}"
        ) from None


def vllm_words(config: EngineConfig, model: str) -> list[str]:
    """Return the options of ``vllm serve`` for ``config``. Those of ``engine_options`` come last, so they win.

    Args:
        model: folder, or name on the hub.
    """
    words = ["--model", model, "--enable-logging-iteration-details"]
    for name, flag in _ALWAYS.items():
        words += [flag, str(getattr(config, name))]
    for name, flag in _WHEN_GIVEN.items():
        value = getattr(config, name)
        if value != _default_of(name):
            words += [flag, str(value)]
    words += [flag for name, flag in _SWITCHES.items() if getattr(config, name)]
    words += _adapter_words(config)
    # Without the option, vLLM caches prefixes where the model allows it; an encoder, say, does not.
    words += [] if config.enable_prefix_caching else ["--no-enable-prefix-caching"]
    if config.profile_dir:
        profiler = {"profiler": "torch", "torch_profiler_dir": config.profile_dir}
        words += ["--profiler-config", msgspec.json.encode(profiler).decode()]
    return words + own_words(config)


def lora_setup(config: EngineConfig) -> LoraSetup | None:
    """Return the limits of adapters; None for an engine that serves none."""
    setup = config.lora_setup
    if setup is None or config.device != "cpu":
        return setup
    return msgspec.structs.replace(setup, max_cpu_loras=setup.max_loras)


def _adapter_words(config: EngineConfig) -> list[str]:
    setup = lora_setup(config)
    if setup is None:
        return []
    # vLLM's kernels for CPUs add the adapter of the last slot to tokens without one. vLLM fills the lowest free slot,
    # so with one slot more than there ever are adapters in memory, the last one stays empty.
    num_spare = int(config.device == "cpu")
    limits = {
        "--max-loras": setup.max_loras + num_spare,
        "--max-cpu-loras": setup.max_cpu_loras + num_spare,
        "--max-lora-rank": setup.max_lora_rank,
    }
    return ["--enable-lora", *(word for flag, limit in limits.items() for word in (flag, str(limit)))]


def vllm_environment(config: EngineConfig, present: Mapping[str, str], num_cores: int) -> dict[str, str]:
    """Return the variables to set before vLLM is imported, except those that the operator has set.

    Args:
        num_cores: number of cores that this process may use.
    """
    # Use our log format and level.
    variables = {"VLLM_CONFIGURE_LOGGING": "0"}
    if config.device == "cpu":
        # By default vLLM pins threads to cores, and engines of one host would use the same cores.
        share = config.num_threads or max(1, num_cores // config.num_engines_on_host)
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(share)}
        # Otherwise vLLM starts another process for the model, to set the number of threads there.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {name: value for name, value in variables.items() if name not in present}


def _default_of(name: str) -> object:
    return next(field.default for field in msgspec.structs.fields(EngineConfig) if field.name == name)
