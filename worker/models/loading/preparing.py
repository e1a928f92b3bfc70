"""Prepare a model before it is tried out: fewer bits for KV cache and linear layers, the fastest form for its device.

Keys and values in eight bits take half the memory of 16, so twice the tokens fit, for a rounding error of some percent.
A float of eight bits has few exponents: e4m3 those from 2^-9 to 448. So the keys and the values of each layer are
divided by a scale per layer, chosen when the model is loaded, from a forward of some tokens. The scale is a power of
two: dividing by it is exact, and engines agree on it although the last bits of their results differ.
"""

from __future__ import annotations

import math

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from ....kernels.paged_attention import PagedBatch
from ....shared.errors import ModelLoadError
from ...config.engine_config import EngineConfig
from ..attention.call import CacheFormat
from ..checks.conformance import FOUR_BITS_TOLERANCE, QUANTIZED_TOLERANCE
from ..forward import Forward, ModelInput
from ..lean.captured import make_captured
from ..lean.native import make_native
from ..placing.packed_linear import pack_linear_layers
from ..placing.quantized_linear import quantize_linear_layers

log = structlog.get_logger(__name__)


CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

# A float has the same digits wherever its exponent is, so room for what is larger than anything seen costs nothing
# until the smallest numbers fall out below: of e4m3, what is 3,600 times smaller than the largest seen.
_HEADROOM = 8
_NUM_TOKENS = 64
_BLOCK_SIZE = 16


def hold_in_eight_bits(forward: Forward, name: str, vocab_size: int, max_model_len: int) -> None:
    """Have the caches of ``forward`` made in the dtype ``name``, from now on. Those that it has are gone afterwards.

    Raises:
        ModelLoadError: the model's own code reads what is cached.
    """
    if not forward.attention_calls:
        raise ModelLoadError(
            f"kv_cache_dtype {name!r} needs a model that attends by our kernels, and this one is computed in the mode "
            f"{forward.mode!r}, by transformers' code alone; use kv_cache_dtype 'auto'"
        )
    _fill_caches(forward, vocab_size, min(_NUM_TOKENS, max_model_len))
    dtype = CACHE_DTYPES[name]
    for call in forward.attention_calls:
        assert call.key_cache is not None
        assert call.value_cache is not None
        call.cache_format = CacheFormat(dtype, _scale_for(call.key_cache, dtype), _scale_for(call.value_cache, dtype))


def fit_again(forward: Forward, name: str, vocab_size: int, max_model_len: int) -> None:
    """``hold_in_eight_bits`` of a model that has other weights by now: as they are first computed, in their dtype."""
    for call in forward.attention_calls:
        call.cache_format = CacheFormat(call.dtype)
    hold_in_eight_bits(forward, name, vocab_size, max_model_len)


def _fill_caches(forward: Forward, vocab_size: int, num_tokens: int) -> None:
    """Compute a prompt of different tokens, alone."""
    device = next(forward.network.parameters()).device
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    forward.allocate(num_blocks, _BLOCK_SIZE, 1, device)
    positions = torch.arange(num_tokens, device=device)
    blocks = torch.arange(num_blocks, device=device)[None]
    forward.run(
        ModelInput(
            token_ids=(1 + positions) * 7919 % vocab_size,
            positions=positions,
            logit_rows=positions[-1:],
            batch=PagedBatch(blocks, positions, [num_tokens], [num_tokens], _BLOCK_SIZE),
            state_slots=np.zeros(1, np.int64),
        )
    )
    forward.commit()


def _scale_for(cache: Tensor, dtype: torch.dtype) -> float:
    """A power of two, such that ``_HEADROOM`` times the largest number in ``cache`` is still in ``dtype``."""
    largest = cache.abs().amax().item()
    if not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** math.ceil(math.log2(largest * _HEADROOM / torch.finfo(dtype).max))


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
