"""Sharing by transformers' own plans, which exist for most architectures.

The plans cut while the files are read, so no rank ever holds the whole model.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

from ....shared.errors import ConfigurationError
from ....shared.values.distribution import install_command
from .cut import check_shares
from .layout import ParallelLayout

_KEYS = ("k_proj", "qkv_proj", "query_key_value")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# The first version whose plans divide experts among ranks.
_EXPERTS_SINCE = "5.23"
# Model types whose ranks generate other tokens by their plan than the whole model does, found by ``make models
# TENSOR_PARALLEL=2``. At load there is no whole model to compare with.
_WRONG_PLANS = frozenset({"gemma3n_text", "hrm_text"})


def planned_options(
    model_config: Any, layout: ParallelLayout, architecture: str, device: torch.device
) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that give each rank its part.

    Args:
        model_config: of the text decoder.

    Raises:
        ConfigurationError: ranks cannot share the model like this; the message has reason and remedy.
    """
    if layout.pipeline > 1:
        has_plan = bool(getattr(model_config, "base_model_tp_plan", None))
        instead = f"tensor_parallel_size {layout.world_size} instead" if has_plan else "pipeline_parallel_size 1"
        raise ConfigurationError(
            f"pipeline_parallel_size is {layout.pipeline}, but {architecture} is not among the families that are "
            f"computed in stages; use {instead}"
        )
    option = "enable_expert_parallel" if layout.is_expert_parallel else "tensor_parallel_size"
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigurationError(
            f"{option} shares {architecture} by transformers' own plan, which needs the package accelerate; "
            f"{install_command('distributed')}"
        )
    if device.type == "cpu" and torch.accelerator.is_available():
        raise ConfigurationError(
            f"{option} shares {architecture} by transformers' own plan, which takes the accelerator that is there, but "
            f"device is 'cpu'; hide it (CUDA_VISIBLE_DEVICES=) or use device 'cuda'"
        )
    sizes: dict[str, Any] = {"tp_size": layout.tensor}
    if layout.is_expert_parallel:
        _check_experts(model_config, layout, architecture)
        sizes["ep_size"] = layout.tensor
    _check_plan(model_config, layout, architecture)
    return {"distributed_config": DistributedConfig(**sizes)}


@contextmanager
def chosen_device(device: torch.device) -> Iterator[None]:
    """Let transformers use this process's device for the rank, within the context."""
    if device.type != "cuda":
        yield
        return
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


def _check_plan(model_config: Any, layout: ParallelLayout, architecture: str) -> None:
    plan = getattr(model_config, "base_model_tp_plan", None) or {}
    # Without a plan ranks may share experts, and hold all other weights.
    if not plan and not layout.is_expert_parallel:
        has_experts = bool(getattr(model_config, "base_model_ep_plan", None))
        raise ConfigurationError(
            f"tensor_parallel_size is {layout.tensor}, but transformers {transformers.__version__} has no plan for how "
            f"ranks share {architecture}; use {'enable_expert_parallel' if has_experts else 'tensor_parallel_size 1'}"
        )
    if model_config.model_type in _WRONG_PLANS:
        raise ConfigurationError(
            f"tensor_parallel_size is {layout.tensor}, but ranks that share {architecture} by the plan of transformers "
            f"{transformers.__version__} make other tokens than the whole model does; use tensor_parallel_size 1"
        )
    sharded = {name.rsplit(".", 1)[-1] for name, style in plan.items() if style == "colwise"}
    num_heads = _of_all_layers(model_config, "num_attention_heads", layout, architecture)
    if isinstance(num_heads, int) and sharded.intersection((*_KEYS, "q_proj", "q_b_proj")):
        check_shares(num_heads, layout, f"attention heads of {architecture}")
        num_kv_heads = _of_all_layers(model_config, "num_key_value_heads", layout, architecture)
        if isinstance(num_kv_heads, int) and sharded.intersection(_KEYS):
            check_shares(num_kv_heads, layout, f"heads of keys and values of {architecture}")


def _of_all_layers(model_config: Any, name: str, layout: ParallelLayout, architecture: str) -> Any:
    """Return the field ``name``; None if there is none. Some configurations raise for fields that differ by layer."""
    try:
        return getattr(model_config, name, None)
    except Exception as error:
        raise ConfigurationError(
            f"tensor_parallel_size is {layout.tensor}, but the layers of {architecture} differ in {name}, so that "
            f"it is unknown whether ranks could share them; use tensor_parallel_size 1"
        ) from error


def _check_experts(model_config: Any, layout: ParallelLayout, architecture: str) -> None:
    if "ep_size" not in {field.name for field in dataclasses.fields(DistributedConfig)}:
        raise ConfigurationError(
            f"enable_expert_parallel needs transformers {_EXPERTS_SINCE} or newer, and {transformers.__version__} is "
            f"installed; upgrade it, or leave the option out"
        )
    if not getattr(model_config, "base_model_ep_plan", None):
        raise ConfigurationError(
            f"enable_expert_parallel is set, but transformers {transformers.__version__} knows no experts of "
            f"{architecture} that ranks could share; leave the option out"
        )
    num_experts = next((getattr(model_config, name) for name in _EXPERTS if hasattr(model_config, name)), None)
    if isinstance(num_experts, int):
        check_shares(num_experts, layout, f"experts of {architecture}")
