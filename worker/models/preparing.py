"""What is done to a model that is read, before it is tried out: as few bits as asked for, as fast as its device can."""

from __future__ import annotations

import structlog
import torch
from torch import nn

from ..config.engine_config import EngineConfig
from .cache.eight_bit import hold_in_eight_bits
from .checks.conformance import FOUR_BITS_TOLERANCE, QUANTIZED_TOLERANCE
from .forward import Forward
from .lean.graphs.captured import make_captured
from .lean.native import make_native
from .packed_linear import pack_linear_layers
from .quantized_linear import quantize_linear_layers

log = structlog.get_logger(__name__)


def prepare(
    forward: Forward, config: EngineConfig, device: torch.device, vocab_size: int, max_model_len: int
) -> Forward:
    """The same computation, as fast as it goes on ``device``."""
    if config.eight_bit_cache is not None:
        hold_in_eight_bits(forward, config.eight_bit_cache, vocab_size, max_model_len)
    pack(forward.network, config, device)
    if device.type == "cuda":
        return forward if config.enforce_eager else make_captured(forward, config.token_budget)
    # The compiled decoder attends by itself, and has caches in the dtype of the weights.
    is_native = config.attention_backend in ("auto", "native") and config.eight_bit_cache is None
    return make_native(forward, config.block_size) if is_native else forward


def prepared_tolerance(config: EngineConfig) -> float | None:
    """Of the prepared model's logits; None for that of its dtype."""
    if config.quantization == "int4":
        return FOUR_BITS_TOLERANCE
    return QUANTIZED_TOLERANCE if config.quantization or config.eight_bit_cache else None


def described(config: EngineConfig) -> str:
    """What is particular about the prepared model."""
    parts = [f"a KV cache of {config.eight_bit_cache}"] if config.eight_bit_cache else []
    parts.append(f"linear layers in {config.quantization}" if config.quantization else "packed layers")
    return " and ".join(parts)


def pack(network: nn.Module, config: EngineConfig, device: torch.device) -> None:
    """Let the linear layers of ``network`` hold their weights as ``device`` reads them fastest, or in fewer bits."""
    if device.type == "cpu":
        log.debug("linear_layers_packed", count=pack_linear_layers(network, config.quantization))
    elif config.quantization is not None:
        log.debug("linear_layers_quantized", count=quantize_linear_layers(network, config.quantization))
