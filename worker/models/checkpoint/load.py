"""Reads a model's files into transformers' module: all that the model needs, and nothing that it has no place for.

transformers fills what it does not find with random numbers, and passes over what it cannot place. Either gives a model
that answers nonsense, so both refuse the model here, but for what is known to be left out or left over.
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
from .errors import ShapeMismatch, explain, few, wrong_layers, wrong_sizes
from .quantized import load_quantized

# What older files hold and no model has learned: rotary frequencies, position numbers, causal masks, sinusoids.
_COMPUTED = re.compile(
    r"(^|\.)("
    r"(original_)?inv_freq|(cos|sin)_cached|position_ids|masked_bias|causal_mask|(attn|attention)\.bias"
    r"|embed_positions\.weights|(encoder|decoder)\.version|num_batches_tracked"
    r")$"
)
# Layers that guess tokens ahead, for drafts. Some families number them behind the layers of the model itself.
_GUESSES_AHEAD = re.compile(r"(^|\.)mtp(_\w+)?\.")
_NUMBERED_AHEAD = re.compile(r"^(.*\.\d+\.)(eh_proj|enorm|hnorm)\.")
# transformers reports in a table of its own what we say in a sentence.
_REPORT = "LOAD REPORT"

log = structlog.get_logger(__name__)


@dataclass
class _Difference:
    """What the files and the module do not have in common, by the names of the module's tensors.

    Args:
        missing: in no file, and now random.
        unexpected: in a file, and nowhere in the module.
        misfits: in both, with different shapes.
    """

    missing: list[str]
    unexpected: list[str]
    misfits: list[ShapeMismatch]

    @classmethod
    def of(cls, info: dict[str, Any]) -> _Difference:
        """Of what ``from_pretrained`` tells."""
        misfits = [ShapeMismatch(name, tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"]]
        return cls(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), sorted(misfits))


def load_checkpoint(
    folder: Path,
    model_config: PretrainedConfig,
    architecture: str,
    *,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    auto_class: Any = AutoModelForCausalLM,
    passed_over: tuple[str, ...] = (),
    **options: Any,
) -> PreTrainedModel:
    """Load the module that ``model_config`` describes from the files in ``folder``.

    Args:
        auto_class: of transformers, which knows the module's class.
        passed_over: beginnings of names of tensors that may be in the files without being needed.
        options: of the module's class.

    Raises:
        ModelLoadError: a file is missing or damaged, or files and configuration do not fit each other; says which
            tensors.
    """
    how: dict[str, Any] = {
        "config": model_config,
        "trust_remote_code": trust_remote_code,
        # It defines the architecture; a fused default may leave out a soft cap (Gemma 2 under 5.17).
        "attn_implementation": "eager",
        "output_loading_info": True,
        # Refused below, with their names.
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
    except Exception as error:  # whatever the architecture's own code raises
        reason = explain(error, folder, model_config, trust_remote_code=trust_remote_code)
        raise ModelLoadError(f"{architecture} in {folder} cannot be loaded: {reason}") from error
    difference = _Difference.of(info)
    difference.unexpected = [name for name in difference.unexpected if not name.startswith(passed_over)]
    _check_complete(module, model_config, difference, folder, architecture)
    return module


def check_finite(network: nn.Module, architecture: str) -> None:
    """Verify that every weight is a number. Reads all of them once: 16 GB in seconds on a CPU.

    Raises:
        ModelLoadError: some are NaN or infinite; says in which tensors.
    """
    spoilt = spoilt_tensors(network)
    if spoilt:
        raise ModelLoadError(f"{architecture} cannot be served: {spoilt}")


def spoilt_tensors(network: nn.Module) -> str:
    """A sentence about the weights that are NaN or infinite; empty if there are none."""
    parameters = [(name, tensor) for name, tensor in network.named_parameters() if tensor.is_floating_point()]
    spoilt = [name for name, tensor in parameters if not _is_finite(tensor)]
    if not spoilt:
        return ""
    return f"there is NaN or infinity in {len(spoilt)} of its tensors: {few(spoilt)}. Fetch the model again"


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all its numbers are. No copy is made: the least and the largest are NaN if one is."""
    if tensor.numel() == 0 or tensor.is_meta:
        return True
    values = tensor.detach()
    # Floats of eight bits have no order in torch.
    values = values.float() if values.itemsize == 1 else values
    least, largest = torch.aminmax(values)
    return bool(torch.isfinite(least) & torch.isfinite(largest))


def _check_complete(
    module: PreTrainedModel, model_config: PretrainedConfig, difference: _Difference, folder: Path, architecture: str
) -> None:
    """Raises ``ModelLoadError``."""
    unexpected = _unexplained(module, model_config, difference.unexpected)
    passed_over = sorted(set(difference.unexpected) - set(unexpected))
    if passed_over:
        log.info("tensors_passed_over", count=len(passed_over), such_as=passed_over[:3])
    told = [*wrong_layers(module, difference.missing, unexpected), *wrong_sizes(module, difference.misfits)]
    missing = difference.missing
    if missing:
        told.append(f"{_count(missing, 'that it needs', 'is', 'are')} in none of its files: {few(missing)}")
    if unexpected:
        told.append(f"{_count(unexpected, 'of its files')} no place in it: {few(unexpected)}")
    if difference.misfits:
        shapes = [f"{each.name} is {list(each.found)}, not {list(each.wanted)}" for each in difference.misfits]
        told.append(f"{_count(shapes, 'of its files')} another shape than config.json asks for: {few(shapes)}")
    if told:
        raise ModelLoadError(
            f"{architecture} in {folder} cannot be served, because config.json and the weight files do not fit each "
            f"other, or some are missing: {'; '.join(told)}. Fetch the model again, or correct config.json"
        )


def _unexplained(module: PreTrainedModel, model_config: PretrainedConfig, names: list[str]) -> list[str]:
    """Those of the tensors without a place in the module that ought to have one."""
    drafts = tuple(found[1] for name in names if (found := _NUMBERED_AHEAD.match(name)))
    # The module's own configuration may be that of a text model alone, and names none.
    is_of_another = type(module).__name__ not in (model_config.architectures or [type(module).__name__])

    def is_explained(name: str) -> bool:
        if _COMPUTED.search(name) or _GUESSES_AHEAD.search(name) or (drafts and name.startswith(drafts)):
            return True
        # Of an image tower, an encoder, another head: what was saved is more than, or other than, what is served.
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
    """Whether ``name`` leads into a list of layers that ``root`` has."""
    for part in name.split("."):
        if part.isdecimal() and isinstance(root, nn.ModuleList):
            return True
        if part not in root._modules:
            return False
        root = root._modules[part] or nn.Identity()
    return False


def _count(found: list[str], which: str, one: str = "has", many: str = "have") -> str:
    return f"1 tensor {which} {one}" if len(found) == 1 else f"{len(found)} tensors {which} {many}"


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
