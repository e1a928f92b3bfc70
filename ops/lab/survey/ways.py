"""``python -m penstock.ops.lab.survey.ways``: measures lean against packed forwards, by family, on one CPU thread.

Random models of the widths of a 135M model, with fewer layers. The packed mode (split, if layers keep states), lean
layers in Python and the compiled decoder compute the same steps in turns. CPU time is measured, so other load matters
little. The output is the packed mode's time, and the speed-up of the others: the median over rounds of the ratio of
least times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import structlog
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ....kernels import native
from ....kernels.paged_attention import PagedBatch
from ....worker.models.forward import Forward, ForwardSettings, ModelInput
from ....worker.models.lean.forward import LeanForward
from ....worker.models.lean.native import make_native
from ....worker.models.modes.cached import split_forward
from ....worker.models.modes.packed import PackedForward
from ....worker.models.modes.partition import CutRule
from ....worker.models.placing.packed_linear import pack_linear_layers

_BLOCK_SIZE = 16
_CONTEXT = 256
_MAX_REQUESTS = 16
_SETTINGS = ForwardSettings(max_model_len=512)
_VOCAB_SIZE = 8192
# Those of SmolLM-135M, but for its vocabulary and 30 layers.
_SIZES: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "vocab_size": _VOCAB_SIZE,
    "sliding_window": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Of types whose layers keep states: kinds of layers as in their models that people run, and sizes of states.
_STATES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv", "conv"], "conv_L_cache": 3},
    "qwen3_5_text": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 192,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention"] * 4 + ["full_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 1536,
        "mamba_n_heads": 18,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
}
# Of types with experts: as many for a token as in their models that people run, and fewer of them in all.
_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 192, "norm_topk_prob": True},
    "qwen2_moe": {
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 352,
        "shared_expert_intermediate_size": 1408,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 576},
    "granitemoeshared": {"num_local_experts": 32, "intermediate_size": 512, "shared_intermediate_size": 1024},
    "glm4_moe": {
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
    },
}
# Of types whose layers differ in more than windows; the later ones read keys and values of others, as in their models
# that people run.
_LAYERS: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "global_head_dim": 128,
        "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": _VOCAB_SIZE,
    },
}
_PARTICULAR = _LAYERS | _STATES | _EXPERTS
# None by default in some types, and needed all the same.
_ALWAYS = ("num_key_value_heads", "pad_token_id", "bos_token_id", "eos_token_id")
_MODEL_TYPES = (
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "glm",
    "glm4",
    "ministral",
    "seed_oss",
    "ernie4_5",
    "exaone4",
    "cohere2",
    "starcoder2",
    "stablelm",
    "nemotron",
    "hunyuan_v1_dense",
    *_PARTICULAR,
)
# Name, requests, tokens of each in the step.
_STEPS = (("1 decode", 1, 1), ("16 decodes", _MAX_REQUESTS, 1), ("256 of a prompt", 1, _CONTEXT))


@dataclass
class ComputePath:
    """A way of computing."""

    name: str
    forward: Forward


def make_model(model_type: str, num_layers: int) -> PreTrainedModel:
    """Return a random model of a type in bfloat16."""
    config_class = CONFIG_MAPPING[model_type]
    defaults = config_class().to_dict()
    sizes = {**_SIZES, "num_hidden_layers": num_layers}
    fields = {name: value for name, value in sizes.items() if defaults.get(name) is not None or name in _ALWAYS}
    if defaults.get("layer_types"):
        kinds = list(dict.fromkeys(defaults["layer_types"]))
        fields["layer_types"] = (kinds * num_layers)[:num_layers]
    if defaults.get("head_dim") is None and "head_dim" in defaults:
        fields["head_dim"] = _SIZES["head_dim"]
    for name, value in _PARTICULAR.get(model_type, {}).items():
        fields[name] = (value * num_layers)[:num_layers] if name == "layer_types" else value
    config = config_class(**fields)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()


def ways_of(model_type: str, num_layers: int) -> list[ComputePath]:
    """Return the compute paths: packed or split, and the lean ones."""
    torch.manual_seed(0)
    lean = LeanForward(make_model(model_type, num_layers), _SETTINGS)
    other = make_model(model_type, num_layers)
    packed = split_forward(other, _SETTINGS, CutRule()) if lean.keeps_state else PackedForward(other, _SETTINGS)
    for forward in (packed, lean):
        pack_linear_layers(forward.network)
    ways = [ComputePath("packed", packed), ComputePath("lean", lean)]
    compiled = make_native(lean, _BLOCK_SIZE)
    if compiled is not lean:
        ways.append(ComputePath("compiled", compiled))
    return ways


def make_step(num_requests: int, query_len: int) -> ModelInput:
    """Return a step with the last ``query_len`` tokens of ``_CONTEXT`` for ``num_requests`` requests."""
    num_blocks = _CONTEXT // _BLOCK_SIZE
    table = torch.arange(num_requests * num_blocks).view(num_requests, num_blocks)
    positions = torch.arange(_CONTEXT - query_len, _CONTEXT)
    slots = table[:, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    num_tokens = num_requests * query_len
    return ModelInput(
        token_ids=torch.arange(num_tokens) * 7919 % _VOCAB_SIZE,
        positions=positions.repeat(num_requests),
        logit_rows=torch.arange(1, num_requests + 1) * query_len - 1,
        batch=PagedBatch(table, slots.flatten(), [query_len] * num_requests, [_CONTEXT] * num_requests, _BLOCK_SIZE),
        state_slots=np.arange(num_requests),
    )


@torch.inference_mode()
def gains_of(model_type: str, num_layers: int, rounds: int, turn_s: float) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield, for each of ``_STEPS``, the packed mode's time in ms, and the speed-up of the others by name."""
    ways = ways_of(model_type, num_layers)
    num_blocks = _MAX_REQUESTS * _CONTEXT // _BLOCK_SIZE
    for _, num_requests, query_len in _STEPS:
        step = make_step(num_requests, query_len)
        for way in ways:
            way.forward.allocate(num_blocks, _BLOCK_SIZE, num_requests, torch.device("cpu"))
        least = [{way.name: _least(partial(way.forward.run, step), turn_s) for way in ways} for _ in range(rounds)]
        gains = {way.name: statistics.median(found["packed"] / found[way.name] for found in least) for way in ways[1:]}
        yield 1e3 * min(found["packed"] for found in least), gains


def _least(run: Callable[[], object], turn_s: float) -> float:
    run()
    times: list[float] = []
    while sum(times) < turn_s or len(times) < 3:
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, or ``words``; measure, and print a table."""
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.survey.ways", description=__doc__)
    parser.add_argument("--only", default=",".join(_MODEL_TYPES), help="model types, with commas")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-s", type=float, default=0.2, help="processor time of a way in a round")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    transformers_logging.set_verbosity_error()
    refusal = native.load()
    if refusal is not None:
        sys.stderr.write(f"without compiled kernels: {refusal}\n")
    loaded = native.loaded()
    columns = "".join(f" {name}: packed, ms | lean | compiled |" for name, _, _ in _STEPS)
    _print_line(f"{loaded.instructions if loaded else 'torch'}, bfloat16, {arguments.layers} layers, one thread\n")
    _print_line(f"| model type |{columns}")
    _print_line("|---|" + "---|---|---|" * len(_STEPS))
    for model_type in arguments.only.split(","):
        cells = [
            f" {packed_ms:.1f} | {gains['lean']:.2f} | {_told(gains)} |"
            for packed_ms, gains in gains_of(model_type, arguments.layers, arguments.rounds, arguments.turn_s)
        ]
        _print_line(f"| {model_type} |" + "".join(cells))
    return 0


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _told(gains: dict[str, float]) -> str:
    return f"{gains['compiled']:.2f}" if "compiled" in gains else ""


if __name__ == "__main__":
    sys.exit(main())
