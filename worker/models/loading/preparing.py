"""Prepare a model before it is tried out: fewer bits for KV cache and linear layers, the fastest form for its device.

Keys and values in eight bits take about half the memory of 16, so nearly twice the tokens fit. int8 has a scale for
each 32 dimensions of a token's head, and needs no preparation.

A float of eight bits has few exponents: e4m3 those from 2^-9 to 448. So the keys and the values of each layer are
divided by a scale per layer, chosen when the model is loaded, from a forward of some tokens. The scale is a power of
two: dividing by it is exact, and engines agree on it although the last bits of their results differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
import torch
from torch import Tensor, nn

from ....shared.errors import ModelLoadError
from ...config.engine_config import EngineConfig
from ..attention.call import CacheFormat
from ..checks.chosen import choose_kernels
from ..checks.conformance import FOUR_BITS_TOLERANCE, QUANTIZED_TOLERANCE
from ..formats.declared import declared_quantization
from ..forward import Forward
from ..lean.captured import make_captured
from ..lean.native import make_native
from ..placing.packed_linear import has_file_numbers, pack_linear_layers
from ..placing.quantized_linear import quantize_linear_layers
from .calibration import do_not_report, pack_by_examples, run_prompts, varied_prompt
from .text_check import TextCheck

log = structlog.get_logger(__name__)


CACHE_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

# A float has the same number of digits at any exponent, so headroom above the largest number seen costs nothing until
# the smallest numbers underflow: for e4m3, those 3,600 times smaller than the largest seen.
_HEADROOM = 8
_NUM_TOKENS = 64


def use_eight_bit_cache(forward: Forward, name: str, vocab_size: int, max_model_len: int) -> None:
    """Let ``forward`` allocate caches in the dtype ``name`` from now on. Its current caches are dropped.

    Raises:
        ModelLoadError: the model's own code reads the cache.
    """
    if not forward.attention_calls:
        raise ModelLoadError(
            f"kv_cache_dtype {name!r} needs a model that attends by our kernels, and this one is computed in the mode "
            f"{forward.mode!r}, by transformers' code alone; use kv_cache_dtype 'auto'"
        )
    dtype = CACHE_DTYPES[name]
    if dtype == torch.int8:
        for call in forward.attention_calls:
            call.cache_format = CacheFormat(dtype)
        return
    run_prompts(forward, [varied_prompt(vocab_size, min(_NUM_TOKENS, max_model_len))], slice(-1, None))
    forward.commit()
    for call in forward.attention_calls:
        assert call.caches is not None
        call.cache_format = CacheFormat(dtype, *(_scale_for(cache, dtype) for cache in call.caches[:2]))


def rescale_eight_bit_cache(forward: Forward, name: str, vocab_size: int, max_model_len: int) -> None:
    """Choose the scales again for new weights. They are first computed with caches in the model's dtype."""
    for call in forward.attention_calls:
        call.cache_format = CacheFormat(call.dtype)
    use_eight_bit_cache(forward, name, vocab_size, max_model_len)


def _scale_for(cache: Tensor, dtype: torch.dtype) -> float:
    """Return a power of two for which ``_HEADROOM`` times the largest number in ``cache`` still fits in ``dtype``."""
    largest = cache.abs().amax().item()
    if not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** math.ceil(math.log2(largest * _HEADROOM / torch.finfo(dtype).max))


def prepare(
    forward: Forward,
    config: EngineConfig,
    device: torch.device,
    vocab_size: int,
    max_model_len: int,
    prompts: Sequence[Sequence[int]] = (),
    report: Callable[[], None] = do_not_report,
    text: list[int] | None = None,
) -> Forward:
    """Return a forward with the same computation in its fastest form for ``device``.

    Args:
        prompts: of ``calibration_prompts``.
        report: called after each layer that is packed by the prompts.
        text: of ``check_prompt``; None or empty for no check.

    Raises:
        ModelLoadError: the model predicts another text in the formats of ``config``.
    """
    check = TextCheck(forward, text) if text else None
    if config.eight_bit_cache is not None:
        use_eight_bit_cache(forward, config.eight_bit_cache, vocab_size, max_model_len)
    if prompts and config.quantization is not None:
        pack_by_examples(forward, prompts, config.quantization, report)
    pack(forward.network, config, device)
    choose_kernels(forward, config.block_size, is_fixed=config.deterministic, has_adapters=config.enable_lora)
    # The compiled decoder has its own attention, with caches in the dtype of the weights or in int8.
    is_native = config.attention_backend in ("auto", "native") and config.eight_bit_cache in (None, "int8")
    if device.type == "cpu" and is_native:
        forward = make_native(forward, config.block_size)
    if check is not None:
        check.compare(forward, config, vocab_size)
    is_captured = device.type == "cuda" and not config.enforce_eager
    return make_captured(forward, config.token_budget) if is_captured else forward


def prepared_tolerance(config: EngineConfig, network: nn.Module) -> float | None:
    """Return the tolerance of the logits of the prepared ``network``; None for that of its dtype."""
    if config.has_four_bit_weights:
        return FOUR_BITS_TOLERANCE
    takes_bytes = config.quantization is not None or has_file_numbers(network)
    return QUANTIZED_TOLERANCE if takes_bytes or config.eight_bit_cache else None


def weight_format(config: EngineConfig, folder: Path, network: nn.Module) -> str | None:
    """Return the format of the linear layers of ``network``, read from ``folder``; None for the model's dtype.

    It is the one of ``config``, or that of the file whose numbers are used.
    """
    declared = declared_quantization(folder)
    return config.quantization or (declared.method if declared and has_file_numbers(network) else None)


def describe_preparation(config: EngineConfig, network: nn.Module) -> str:
    """Return the properties of the prepared model, whose layers are in ``network``, for messages."""
    parts = [f"a KV cache of {config.eight_bit_cache}"] if config.eight_bit_cache else []
    if config.quantization:
        parts.append(f"linear layers in {config.quantization}")
    else:
        parts.append("its file's numbers and inputs in bytes" if has_file_numbers(network) else "packed layers")
    return " and ".join(parts)


def pack(network: nn.Module, config: EngineConfig, device: torch.device) -> None:
    """Convert the linear layers of ``network`` to the fastest weight layout of ``device``, or to fewer bits."""
    if device.type == "cpu":
        log.debug("linear_layers_packed", count=pack_linear_layers(network, config.quantization))
    elif config.quantization is not None:
        log.debug("linear_layers_quantized", count=quantize_linear_layers(network, config.quantization))
