"""Loads a transformers model and finds the way in which it can be computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...shared.errors import ConfigurationError, ModelLoadError
from ..config import EngineConfig
from .attention_backend import check_attention_backend
from .candidates import choose_forward
from .conformance import QUANTIZED_TOLERANCE
from .eight_bit_cache import hold_in_eight_bits
from .folder import tokenizer_folder
from .forward import Forward, ForwardSettings
from .lean.captured import make_captured
from .lean.native import make_native
from .packed_linear import pack_linear_layers
from .quantized_linear import quantize_linear_layers

_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Their frequencies follow the longest request of a batch, so one request's output would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = ("longrope", "dynamic")
# Of a GPU, from which on Triton converts to float8_e4m3fn.
_FLOAT8_CAPABILITY = (8, 9)

_log = structlog.get_logger(__name__)


@dataclass
class LoadedModel:
    """A model and the way in which it is computed.

    Args:
        folder: where ``tokenizer.json`` is.
        max_model_len: what was asked for, else the model's own limit.
        is_length_chosen: ``max_model_len`` was asked for, and may not be lowered.
        vocab_size: every valid token id is below it.
        num_parameters: shared ones counted once.
        attention_backend: what attends; see ``attention_backend.py``.
    """

    forward: Forward
    folder: Path
    architecture: str
    max_model_len: int
    is_length_chosen: bool
    vocab_size: int
    eos_token_ids: list[int]
    num_parameters: int
    attention_backend: str

    @property
    def network(self) -> nn.Module:
        """What computes, and holds the weights."""
        return self.forward.network

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.network.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.network.parameters()).device


def load_model(config: EngineConfig, folder: Path) -> LoadedModel:
    """Load the model in ``folder`` onto the device of ``config``.

    Raises:
        ModelLoadError: a file, the architecture or its attention is not what we can run; says which.
        ConfigurationError: the device or ``max_model_len`` does not fit.
    """
    device = _device(config)
    transformers_logging.disable_progress_bar()
    model_config = _read_config(folder, config)
    architecture = (model_config.architectures or [model_config.model_type])[0]
    max_model_len = _max_model_len(model_config.get_text_config(), config.max_model_len)
    module = _load_module(folder, model_config, architecture, config, device)
    vocab_size = model_config.get_text_config().vocab_size
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    settings = ForwardSettings(max_model_len, config.deterministic, config.attention_backend)
    forward = choose_forward(
        module,
        architecture,
        vocab_size,
        settings,
        partial(_prepare, config=config, device=device, vocab_size=vocab_size, max_model_len=max_model_len),
        QUANTIZED_TOLERANCE if config.quantization or config.eight_bit_cache else None,
        _described(config),
    )
    attention_backend = check_attention_backend(
        forward, config.attention_backend, architecture, is_batch_invariant=config.deterministic
    )
    return LoadedModel(
        forward=forward,
        folder=tokenizer_folder(folder, config.trust_remote_code),
        architecture=architecture,
        max_model_len=max_model_len,
        is_length_chosen=config.max_model_len is not None,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(module),
        num_parameters=num_parameters,
        attention_backend=attention_backend,
    )


def load_module(config: EngineConfig, folder: Path) -> PreTrainedModel:
    """Load transformers' own module of the model, as it is before anything of ours is done to it.

    Raises: as ``load_model``.
    """
    model_config = _read_config(folder, config)
    architecture = (model_config.architectures or [model_config.model_type])[0]
    return _load_module(folder, model_config, architecture, config, _device(config))


def load_network(config: EngineConfig, folder: Path, forward: Forward) -> nn.Module:
    """Load what computes in ``forward``, a model of ``load_model``, once more.

    Raises: as ``load_model``.
    """
    network = forward.network_of(load_module(config, folder))
    _pack(network, config, _device(config))
    return network


def _prepare(
    forward: Forward, config: EngineConfig, device: torch.device, vocab_size: int, max_model_len: int
) -> Forward:
    """The same computation, as fast as it goes on ``device``."""
    if config.eight_bit_cache is not None:
        hold_in_eight_bits(forward, config.eight_bit_cache, vocab_size, max_model_len)
    _pack(forward.network, config, device)
    if device.type == "cuda":
        return forward if config.enforce_eager else make_captured(forward)
    # The compiled decoder attends by itself, and has caches in the dtype of the weights.
    is_native = config.attention_backend in ("auto", "native") and config.eight_bit_cache is None
    return make_native(forward, config.block_size) if is_native else forward


def _described(config: EngineConfig) -> str:
    """What is particular about the prepared model."""
    parts = [f"a KV cache of {config.eight_bit_cache}"] if config.eight_bit_cache else []
    parts.append(f"linear layers in {config.quantization}" if config.quantization else "packed layers")
    return " and ".join(parts)


def _pack(network: nn.Module, config: EngineConfig, device: torch.device) -> None:
    if device.type == "cpu":
        _log.debug("linear_layers_packed", count=pack_linear_layers(network, config.quantization))
    elif config.quantization is not None:
        _log.debug("linear_layers_quantized", count=quantize_linear_layers(network, config.quantization))


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigurationError(
                "device is 'cuda', but torch sees no GPU; use --device cpu or install a CUDA torch"
            )
        check_float8(config, torch.cuda.get_device_capability())
    return torch.device(config.device)


def check_float8(config: EngineConfig, capability: tuple[int, int]) -> None:
    """Verify that a GPU of ``capability`` has the floats of eight bits that ``config`` wants.

    Raises:
        ConfigurationError: it has not; says what it has.
    """
    if capability >= _FLOAT8_CAPABILITY:
        return
    has = f"compute capability 8.9 or newer (Ada, Hopper), and this GPU has {capability[0]}.{capability[1]}"
    if config.quantization == "fp8":
        raise ConfigurationError(f"quantization 'fp8' needs {has}; use 'int8'")
    if config.eight_bit_cache == "fp8_e4m3":
        raise ConfigurationError(f"kv_cache_dtype {config.kv_cache_dtype!r} needs {has}; use 'fp8_e5m2'")


def _read_config(folder: Path, config: EngineConfig) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a broken file raises anything: OSError, KeyError, ValueError
        raise ModelLoadError(f"{folder / 'config.json'} cannot be read: {_first_line(error)}") from error


def _max_model_len(model_config: PretrainedConfig, wanted: int | None) -> int:
    limits = [getattr(model_config, field, None) for field in _LENGTH_FIELDS]
    # XLNet says -1 for no limit.
    own = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    for rope in _rope_parameters(model_config):
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            unscaled = rope.get("original_max_position_embeddings") or own
            _log.info("rope_unscaled_only", rope_type=rope["rope_type"], max_model_len=unscaled)
            own = unscaled if own is None else min(own, unscaled)
    if own is None and wanted is None:
        raise ConfigurationError("the model's config.json does not say how long a request may be; set max_model_len")
    if own is not None and wanted is not None and wanted > own:
        raise ConfigurationError(f"max_model_len is {wanted}, but the model serves at most {own} positions here")
    max_model_len = wanted if wanted is not None else own or 0
    if max_model_len < 2:
        raise ConfigurationError(f"max_model_len must leave room for a prompt and an output token, got {max_model_len}")
    return max_model_len


def _rope_parameters(model_config: PretrainedConfig) -> list[dict[str, Any]]:
    """The RoPE settings of a model: one set, or one per kind of layer."""
    parameters = getattr(model_config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [settings for settings in parameters.values() if isinstance(settings, dict)]


def _load_module(
    folder: Path, model_config: PretrainedConfig, architecture: str, config: EngineConfig, device: torch.device
) -> PreTrainedModel:
    if config.load_format == "dummy":
        return _draw_module(model_config, architecture, config, device)
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        module = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            # It defines the architecture; a fused default may leave out a soft cap (Gemma 2 under 5.17).
            attn_implementation="eager",
        )
    except Exception as error:  # whatever the architecture's own code raises
        raise ModelLoadError(f"{architecture} in {folder} cannot be loaded: {_first_line(error)}") from error
    torch.nn.Module.to(module, device)
    return module.eval()


def _draw_module(
    model_config: PretrainedConfig, architecture: str, config: EngineConfig, device: torch.device
) -> PreTrainedModel:
    """A model of random weights, made where it computes: 8B parameters take seconds on a GPU, minutes on a host."""
    dtype = getattr(torch, config.dtype) if config.dtype != "auto" else model_config.dtype or torch.float32
    try:
        with device:
            module = AutoModelForCausalLM.from_config(
                model_config, dtype=dtype, trust_remote_code=config.trust_remote_code, attn_implementation="eager"
            )
    except Exception as error:  # whatever the architecture's own code raises
        raise ModelLoadError(f"{architecture} cannot be made from its config: {_first_line(error)}") from error
    return module.eval()


def _eos_token_ids(module: PreTrainedModel) -> list[int]:
    for source in (module.generation_config, module.config.get_text_config()):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return [eos] if isinstance(eos, int) else list(eos)
    return []


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
