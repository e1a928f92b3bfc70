"""What of ``worker start``'s options vLLM is told, in the words of its own command line; the others are refused."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import msgspec

from ....shared.errors import ConfigurationError
from ....shared.values.shown import shown
from ...config.checks import check_taken
from ...config.engine_config import EngineConfig
from ...config.ordering import SCHEDULING_POLICIES

# Whatever they are, they are said: vLLM's defaults are others.
_ALWAYS = {"dtype": "--dtype", "load_format": "--load-format", "max_num_seqs": "--max-num-seqs", "seed": "--seed"}
# Said when they are not the default, which leaves the choice to vLLM.
_WHEN_GIVEN = {
    "max_model_len": "--max-model-len",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "scheduling_policy": "--scheduling-policy",
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
# What this adapter or the worker process sees to, or what is no option.
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
        "profile_dir",
    }
)
TAKEN = _OWN | _ALWAYS.keys() | _WHEN_GIVEN.keys() | _SWITCHES.keys()
_INSTEAD = {
    "quantization": "--quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "attention_backend": "--attention-backend",
    "structured_outputs_backend": "--structured-outputs-config.backend",
}


def check_options(config: EngineConfig) -> None:
    """Refuse options that mean nothing to vLLM.

    Raises:
        ConfigurationError: one is not at its default, or ``engine_options`` cannot be read; names it and the remedy.
    """
    instead = {name: f"say it by vLLM's own {flag} in --engine-options" for name, flag in _INSTEAD.items()}
    check_taken(config, "vllm", TAKEN, instead)
    if config.scheduling_policy not in SCHEDULING_POLICIES:
        raise ConfigurationError(
            f"scheduling_policy {shown(config.scheduling_policy)} is for Penstock's engine, not for 'vllm'; it takes "
            f"{' and '.join(SCHEDULING_POLICIES)}"
        )
    own_words(config)


def own_words(config: EngineConfig) -> list[str]:
    """The words of ``engine_options``. Raises ``ConfigurationError`` if a quote in them does not end."""
    try:
        return shlex.split(config.engine_options)
    except ValueError as error:
        raise ConfigurationError(
            f"engine_options cannot be read: {error}, got {shown(config.engine_options)}"
        ) from None


def vllm_words(config: EngineConfig, model: str) -> list[str]:
    """The command line of ``vllm serve`` that means what ``config`` says. Words of ``engine_options`` are last and win.

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
    words.append("--enable-prefix-caching" if config.enable_prefix_caching else "--no-enable-prefix-caching")
    if config.profile_dir:
        profiler = {"profiler": "torch", "torch_profiler_dir": config.profile_dir}
        words += ["--profiler-config", msgspec.json.encode(profiler).decode()]
    return words + own_words(config)


def vllm_environment(config: EngineConfig, present: Mapping[str, str], num_cores: int) -> dict[str, str]:
    """Variables to be set before vLLM is imported; what the operator has set stays.

    Args:
        num_cores: that this process may keep busy.
    """
    # What it logs goes through our renderer, at our level.
    wanted = {"VLLM_CONFIGURE_LOGGING": "0"}
    if config.device == "cpu":
        # Its own choice pins threads to cores, which engines of one host would share.
        share = config.num_threads or max(1, num_cores // config.num_engines_on_host)
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(share)}
        # One process: it would start another for the model, so that it can set the number of threads there.
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return {name: value for name, value in wanted.items() if name not in present}


def _default_of(name: str) -> object:
    return next(field.default for field in msgspec.structs.fields(EngineConfig) if field.name == name)
