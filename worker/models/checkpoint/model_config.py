"""Read a model's config.json and generation_config.json for the engine, and reject impossible values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

import structlog
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ....shared.errors import ConfigurationError, ModelLoadError
from ...config.engine_config import EngineConfig
from ..formats.declared import QUANTIZATION_FIELDS
from .errors import own_code
from .wording import first_line

_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Their frequencies depend on the longest request of a batch, so one request's output would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = ("longrope", "dynamic")
# Beyond this many keys, the best are chosen by scores (Doge). In 16 bits many scores are equal, and which of them are
# chosen depends on how the prompt is chunked, even in transformers.
_CHOOSING_FIELD = "keep_window_size"

log = structlog.get_logger(__name__)


def read_config(folder: Path, config: EngineConfig) -> PretrainedConfig:
    """Read ``config.json`` in ``folder``, without its settings of quantized weights.

    Raises:
        ModelLoadError: transformers does not know the configuration; the message has the reason.
    """
    try:
        read = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a broken file raises anything: OSError, KeyError, ValueError
        code = None if config.trust_remote_code else own_code(folder)
        if code:
            raise ModelLoadError(f"the model in {folder} cannot be loaded: {code}") from error
        raise ModelLoadError(
            f"{folder / 'config.json'} cannot be read: {first_line(error)}; correct it, or fetch the model again"
        ) from error
    for part in (read, read.get_text_config()):
        for field in QUANTIZATION_FIELDS:
            # ``formats`` reads such weights; transformers would require the package that wrote them.
            vars(part).pop(field, None)
    return read


def max_model_len(model_config: PretrainedConfig, requested: int | None) -> int:
    """Return the most tokens of a request: ``requested``, else the model's own limit.

    Raises:
        ConfigurationError: ``requested`` exceeds the model's limit, or is missing if the model has none.
    """
    field = next((field for field in _LENGTH_FIELDS if _is_limit(getattr(model_config, field, None))), None)
    limit = getattr(model_config, field) if field is not None else None
    source = f"its config.json says {field} {limit}"
    for rope in _rope_parameters(model_config):
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            unscaled = rope.get("original_max_position_embeddings") or limit
            log.info("rope_unscaled_only", rope_type=rope["rope_type"], max_model_len=unscaled)
            limit = unscaled if limit is None else min(limit, unscaled)
            source = f"its RoPE of type {rope['rope_type']!r} is served without its scaling"
        stretched = _yarn_length(rope)
        if limit is not None and stretched > limit:
            limit, source = stretched, f"its RoPE of type 'yarn' stretches {field} to {stretched}"
    num_kept = getattr(model_config, _CHOOSING_FIELD, None)
    if _is_limit(num_kept) and (limit is None or num_kept < limit):
        log.info("keys_unchosen_only", max_model_len=num_kept)
        limit, source = num_kept, f"it chooses among more than {num_kept} keys ({_CHOOSING_FIELD}), which is not served"
    if limit is None and requested is None:
        raise ConfigurationError("the model's config.json does not say how long a request may be; set max_model_len")
    if limit is not None and requested is not None and requested > limit:
        raise ConfigurationError(
            f"max_model_len is {requested}, but the model serves at most {limit} positions here: {source}; "
            f"give {limit} or less, or leave it out"
        )
    longest = requested if requested is not None else limit or 0
    if longest < 2:
        raise ConfigurationError(
            f"max_model_len must be at least 2, for a prompt and an output token, got {longest}: {source}"
        )
    return longest


def eos_token_ids(module: PreTrainedModel, vocab_size: int) -> list[int]:
    """Return the tokens that end a generation: those of ``generation_config.json``, else of ``config.json``.

    Raises:
        ModelLoadError: one is not in the vocabulary, so no generation would end.
    """
    sources = (("generation_config.json", module.generation_config), ("config.json", module.config.get_text_config()))
    for file, source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is None:
            continue
        token_ids = list(value) if isinstance(value, list | tuple) else [value]
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ModelLoadError(
                    f"eos_token_id in {file} is {str(token_id)[:80]!r}, and the model's {vocab_size} tokens are 0 to "
                    f"{vocab_size - 1}: no generation would end there; give the id of the end token, or null for none"
                )
        return token_ids
    return []


def _yarn_length(rope: dict[str, Any]) -> int:
    """Return the positions to which YaRN extends a model; 0 without it.

    ``config.json`` has the unscaled length if YaRN was enabled manually, as the README of Qwen's models says. Source:
    Peng et al. 2023 (arXiv:2309.00071), section 3; vLLM takes the same product.
    """
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope.get("rope_type") != "yarn" or not isinstance(factor, int | float) or not _is_limit(original):
        return 0
    return int(original * factor)


def _is_limit(value: object) -> TypeGuard[int]:
    # XLNet uses -1 for no limit.
    return type(value) is int and value > 0


def _rope_parameters(model_config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the RoPE settings of a model: one set, or one per kind of layer."""
    parameters = getattr(model_config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [settings for settings in parameters.values() if isinstance(settings, dict)]
