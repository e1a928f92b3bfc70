"""Read a model's files into transformers' module: all tensors that the model needs, and no others.

transformers fills missing tensors with random numbers, and ignores those that it cannot place. Either gives a model
that answers nonsense, so both reject the model here, except for tensors that are known to be missing or left over.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ....shared.errors import ModelLoadError
from ..formats.declared import declared_quantization
from .errors import ShapeMismatch, explain, wrong_layers, wrong_sizes
from .quantized import load_quantized
from .wording import few

# Tensors in older files that no model has learned: rotary frequencies, position numbers, causal masks, sinusoids.
_COMPUTED = re.compile(
    r"(^|\.)("
    r"(original_)?inv_freq|(cos|sin)_cached|position_ids|masked_bias|causal_mask|(attn|attention)\.bias"
    r"|embed_positions\.weights|(encoder|decoder)\.version|num_batches_tracked"
    r")$"
)
# Layers that predict further tokens, for drafts. Some families number them after the layers of the model itself.
_GUESSES_AHEAD = re.compile(r"(^|\.)mtp(_\w+)?\.")
_NUMBERED_AHEAD = re.compile(r"^(.*\.\d+\.)(eh_proj|enorm|hnorm)\.")
# transformers reports in a table; we report in a sentence.
_REPORT = "LOAD REPORT"

log = structlog.get_logger(__name__)


@dataclass
class _Difference:
    """Differences between the files and the module, by the names of the module's tensors.

    Args:
        missing: in no file, and now random.
        unexpected: in a file, but not in the module.
        mismatches: in both, with different shapes.
    """

    missing: list[str]
    unexpected: list[str]
    mismatches: list[ShapeMismatch]

    @classmethod
    def of(cls, info: dict[str, Any]) -> _Difference:
        """Return the differences in the loading info of ``from_pretrained``."""
        mismatches = [
            ShapeMismatch(name, tuple(actual), tuple(expected)) for name, actual, expected in info["mismatched_keys"]
        ]
        return cls(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), sorted(mismatches))


def load_checkpoint(
    folder: Path,
    model_config: PretrainedConfig,
    architecture: str,
    *,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    auto_class: Any = AutoModelForCausalLM,
    ignored_prefixes: tuple[str, ...] = (),
    **options: Any,
) -> PreTrainedModel:
    """Load the module that ``model_config`` describes from the files in ``folder``.

    Args:
        auto_class: of transformers, which knows the module's class.
        ignored_prefixes: prefixes of names of tensors that may be in the files without being needed.
        options: of the module's class.

    Raises:
        ModelLoadError: a file is missing or damaged, or files and configuration do not fit each other; the message
            names the tensors.
    """
    how: dict[str, Any] = {
        "config": model_config,
        "trust_remote_code": trust_remote_code,
        # The reference for the architecture; a fused default may omit a soft cap (Gemma 2 under 5.17).
        "attn_implementation": "eager",
        "output_loading_info": True,
        # Rejected below, with their names.
        "ignore_mismatched_sizes": True,
        **options,
    }
    quantization = declared_quantization(folder)
    try:
        with _without_report():
            loaded: Any
            if quantization is None:
                loaded = auto_class.from_pretrained(folder, dtype=dtype, **how)
            else:
                loaded = load_quantized(folder, quantization, auto_class, dtype, how)
            module, info = loaded
    except ModelLoadError:
        raise
    except Exception as error:  # any exception of the architecture's own code
        reason = explain(error, folder, model_config, trust_remote_code=trust_remote_code)
        raise ModelLoadError(f"{architecture} in {folder} cannot be loaded: {reason}") from error
    difference = _Difference.of(info)
    difference.unexpected = [name for name in difference.unexpected if not name.startswith(ignored_prefixes)]
    _check_complete(module, model_config, difference, folder, architecture)
    return module


def check_finite(network: nn.Module, architecture: str) -> None:
    """Verify that every weight is finite. Reads all of them once: 16 GB in seconds on a CPU.

    Raises:
        ModelLoadError: some are NaN or infinite; the message names the tensors.
    """
    spoilt = spoilt_tensors(network)
    if spoilt:
        raise ModelLoadError(f"{architecture} cannot be served: {spoilt}")


def spoilt_tensors(network: nn.Module) -> str:
    """Return a sentence about the weights that are NaN or infinite; "" if there are none."""
    parameters = [(name, tensor) for name, tensor in network.named_parameters() if tensor.is_floating_point()]
    spoilt = [name for name, tensor in parameters if not _is_finite(tensor)]
    if not spoilt:
        return ""
    return f"there is NaN or infinity in {len(spoilt)} of its tensors: {few(spoilt)}. Fetch the model again"


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are finite. Makes no copy: minimum and maximum are NaN if one number is."""
    if tensor.numel() == 0 or tensor.is_meta:
        return True
    values = tensor.detach()
    # Torch cannot order floats of eight bits.
    values = values.float() if values.itemsize == 1 else values
    least, largest = torch.aminmax(values)
    return bool(torch.isfinite(least) & torch.isfinite(largest))


def _check_complete(
    module: PreTrainedModel, model_config: PretrainedConfig, difference: _Difference, folder: Path, architecture: str
) -> None:
    """Raise ``ModelLoadError`` if the files and the module differ in a way that matters."""
    unexpected = _unexplained(module, model_config, difference.unexpected)
    ignored = sorted(set(difference.unexpected) - set(unexpected))
    if ignored:
        log.info("tensors_ignored", count=len(ignored), such_as=ignored[:3])
    problems = [*wrong_layers(module, difference.missing, unexpected), *wrong_sizes(module, difference.mismatches)]
    missing = difference.missing
    if missing:
        problems.append(f"{_count(missing, 'that it needs', 'is', 'are')} in none of its files: {few(missing)}")
    if unexpected:
        problems.append(f"{_count(unexpected, 'of its files')} no place in it: {few(unexpected)}")
    if difference.mismatches:
        shapes = [f"{each.name} is {list(each.actual)}, not {list(each.expected)}" for each in difference.mismatches]
        problems.append(f"{_count(shapes, 'of its files')} another shape than config.json asks for: {few(shapes)}")
    if problems:
        raise ModelLoadError(
            f"{architecture} in {folder} cannot be served, because config.json and the weight files do not fit each "
            f"other, or some are missing: {'; '.join(problems)}. Fetch the model again, or correct config.json"
        )


def _unexplained(module: PreTrainedModel, model_config: PretrainedConfig, names: list[str]) -> list[str]:
    """Return the tensors without a place in the module that should have one."""
    drafts = tuple(match[1] for name in names if (match := _NUMBERED_AHEAD.match(name)))
    # The module's own configuration may be that of a text model only, and names no architecture.
    is_of_another = type(module).__name__ not in (model_config.architectures or [type(module).__name__])

    def is_explained(name: str) -> bool:
        if _COMPUTED.search(name) or _GUESSES_AHEAD.search(name) or (drafts and name.startswith(drafts)):
            return True
        # Tensors of a vision encoder, another encoder or another head: the checkpoint has more or other parts than are
        # served.
        if is_of_another and any(_is_another_part(root, name) for root in (module, module.base_model)):
            return not any(_is_in_a_layer(root, name) for root in (module, module.base_model))
        return False

    return [name for name in names if not is_explained(name)]


def _is_another_part(root: nn.Module, name: str) -> bool:
    """Whether ``root`` lacks the first part of ``name`` that it could have: a whole module, not a tensor of one."""
    *parents, _ = name.split(".")
    for part in parents:
        if part not in root._modules:
            return True
        root = root._modules[part] or nn.Identity()
    return not parents


def _is_in_a_layer(root: nn.Module, name: str) -> bool:
    """Whether ``name`` is inside a list of layers that ``root`` has."""
    for part in name.split("."):
        if part.isdecimal() and isinstance(root, nn.ModuleList):
            return True
        if part not in root._modules:
            return False
        root = root._modules[part] or nn.Identity()
    return False


def _count(names: list[str], which: str, singular: str = "has", plural: str = "have") -> str:
    return f"1 tensor {which} {singular}" if len(names) == 1 else f"{len(names)} tensors {which} {plural}"


@contextmanager
def _without_report() -> Iterator[None]:
    logger = logging.getLogger("transformers.modeling_utils")

    def is_no_report(record: logging.LogRecord) -> bool:
        return _REPORT not in record.getMessage()

    logger.addFilter(is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(is_no_report)
