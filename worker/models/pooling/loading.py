"""Loads a model that pools: its module, and what is made of its hidden states.

A decoder is computed as those that generate are. For that it gets a head that leaves a hidden state as it is, so every
way of computing decoders, the compiled ones too, gives hidden states where it gives logits otherwise.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from ....shared.errors import ModelLoadError
from ....shared.params.pooling import PoolingSetup
from ..checkpoint.load import load_checkpoint
from .folder import CLS, LAST, MEAN, PoolingFolder, class_activation, labels_of, matryoshka_of
from .pooler import ROWS_OF_MODE, OwnHead, Pooler, PoolingModel, Rows, normalize

# Whether a head looks at the first token, the last or the mean of all is tried: by the first of these that conforms.
_HEAD_MODES = (CLS, LAST, MEAN)
_HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
# What some families do to logits behind their head, and how that is left out.
_PLAIN_LOGITS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
_TOKENS = (11, 17, 5, 29, 8)


def load_pooling_module(
    folder: Path,
    model_config: PretrainedConfig,
    architecture: str,
    *,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Load the module that ``model_config`` describes: its base model, and the head of a classifier.

    Raises:
        ModelLoadError: as ``load_checkpoint``.
    """
    auto, options = _auto_class(architecture), {}
    if auto is AutoModel and "add_pooling_layer" in _parameters(model_config):
        options["add_pooling_layer"] = False  # made for next-sentence prediction; many files lack it
    return load_checkpoint(
        folder,
        model_config,
        architecture,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        auto_class=auto,
        passed_over=("pooler.",),
        **options,
    )


def _auto_class(architecture: str) -> Any:
    if architecture.endswith("ForSequenceClassification"):
        return AutoModelForSequenceClassification
    if architecture.endswith("ForTokenClassification"):
        return AutoModelForTokenClassification
    return AutoModelForCausalLM if architecture.endswith(("ForCausalLM", "LMHeadModel")) else AutoModel


def _parameters(model_config: PretrainedConfig) -> set[str]:
    known: Any = AutoModel._model_mapping.get(type(model_config), None)
    return set(inspect.signature(known.__init__).parameters) if isinstance(known, type) else set()


def as_decoder(module: PreTrainedModel, architecture: str) -> PreTrainedModel:
    """Return the causal language model around the base model of ``module``, its head the identity.

    Raises:
        ModelLoadError: transformers has none of the kind, or its logits are more than its head makes of hidden states.
    """
    base: Any = module.base_model
    try:
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(_with_plain_logits(module.config), attn_implementation="eager")
        setattr(causal, causal.base_model_prefix, base)
    except Exception as error:  # whatever the architecture's own code raises
        raise ModelLoadError(f"{architecture} cannot be served as an embedder: {error}") from error
    size = _hidden_size(module)
    identity = nn.Linear(size, size, bias=False, device=module.device, dtype=module.dtype)
    identity.weight = nn.Parameter(torch.eye(size, device=module.device, dtype=module.dtype), requires_grad=False)
    causal.config.tie_word_embeddings = False
    causal.set_output_embeddings(identity)
    if any(parameter.is_meta for parameter in causal.parameters()):
        raise ModelLoadError(f"{architecture} cannot be served as an embedder: its causal model has more than a head")
    causal = causal.eval()
    token_ids = _token_ids(module)
    theirs, ours = base(input_ids=token_ids).last_hidden_state, causal(input_ids=token_ids, use_cache=False).logits
    if _error(ours, theirs) > _HEAD_TOLERANCE[module.dtype]:
        raise ModelLoadError(f"{architecture} cannot be served as an embedder: it changes logits behind its head")
    return causal


def _with_plain_logits(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of ``config`` by which logits are what a head makes of hidden states, as far as we know its fields."""
    config = copy.deepcopy(config)
    for field, neutral in _PLAIN_LOGITS.items():
        if getattr(config, field, None) is not None:
            setattr(config, field, neutral)
    return config


def make_pooling(module: PreTrainedModel, found: PoolingFolder, architecture: str, *, is_encoder: bool) -> PoolingModel:
    """Return what is made of the hidden states of ``module``.

    Raises:
        ModelLoadError: its head does something that we cannot do from the hidden states of its tokens.
    """
    if architecture.endswith("ForTokenClassification"):
        made = _token_classifier(module, found, architecture, is_encoder=is_encoder)
    elif architecture.endswith("ForSequenceClassification"):
        made = _classifier(module, found, architecture, is_encoder=is_encoder)
    else:
        made = _embedder(module, found, is_encoder=is_encoder)
    # As RoBERTa's kin have it, whose tokenizers know one type as well; files of a tokenizer may say otherwise.
    return replace(made, tells_texts_apart=getattr(module.config, "type_vocab_size", 2) != 1)


def _embedder(module: PreTrainedModel, found: PoolingFolder, *, is_encoder: bool) -> PoolingModel:
    mode = found.mode or (CLS if is_encoder else LAST)
    for dense in found.dense:
        dense.to(module.device)
    head = _Dense(found.dense) if found.dense else _as_it_is
    size = int(head(torch.zeros(1, _hidden_size(module), device=module.device)).shape[-1])
    setup = PoolingSetup(
        dimensions=size,
        matryoshka_dimensions=matryoshka_of(module.config),
        prompts=found.prompts or {},
        default_prompt_name=found.default_prompt_name,
    )
    ends = {"finish": normalize, "finishes": found.normalize, "is_cut": True}
    poolers = {
        "embed": Pooler(ROWS_OF_MODE[mode], is_per_token=False, head=head, **ends),
        "token_embed": Pooler(Rows.ALL, is_per_token=True, head=head, **ends),
    }
    return PoolingModel(poolers, setup, is_encoder)


def _classifier(module: PreTrainedModel, found: PoolingFolder, architecture: str, *, is_encoder: bool) -> PoolingModel:
    token_ids = _token_ids(module)
    states = module.base_model(input_ids=token_ids).last_hidden_state[0]
    theirs = _own_logits(module, token_ids)
    head: Any = OwnHead(module) if is_encoder else module.score
    for mode in _HEAD_MODES:
        chosen = {CLS: states[:1], LAST: states[-1:], MEAN: states.mean(0, keepdim=True)}[mode]
        if _error(head(chosen), theirs) <= _HEAD_TOLERANCE[module.dtype]:
            break
    else:
        raise ModelLoadError(
            f"{architecture} cannot be served: its head looks at something else than its first token, its last or the "
            "mean of all"
        )
    pooler = _class_pooler(module, ROWS_OF_MODE[mode], head, theirs.shape[-1], is_per_token=False)
    return PoolingModel({"classify": pooler}, _class_setup(module, found, theirs.shape[-1]), is_encoder)


def _token_classifier(
    module: PreTrainedModel, found: PoolingFolder, architecture: str, *, is_encoder: bool
) -> PoolingModel:
    token_ids = _token_ids(module)
    states = module.base_model(input_ids=token_ids).last_hidden_state[0]
    theirs, head = module(input_ids=token_ids).logits[0], OwnHead(module)
    if _error(head(states), theirs) > _HEAD_TOLERANCE[module.dtype]:
        raise ModelLoadError(f"{architecture} cannot be served: its head looks at more than a token's hidden state")
    pooler = _class_pooler(module, Rows.ALL, head, theirs.shape[-1], is_per_token=True)
    return PoolingModel({"token_classify": pooler}, _class_setup(module, found, theirs.shape[-1]), is_encoder)


def _class_pooler(module: PreTrainedModel, rows: Rows, head: Any, num_labels: int, *, is_per_token: bool) -> Pooler:
    activation = class_activation(module.config, num_labels)
    return Pooler(rows, is_per_token, head, activation, finishes=True, is_cut=False)


def _class_setup(module: PreTrainedModel, found: PoolingFolder, num_labels: int) -> PoolingSetup:
    return PoolingSetup(
        labels=labels_of(module.config, num_labels),
        prompts=found.prompts or {},
        default_prompt_name=found.default_prompt_name,
    )


def _own_logits(module: PreTrainedModel, token_ids: Tensor) -> Tensor:
    return module(input_ids=token_ids).logits


def _token_ids(module: PreTrainedModel) -> Tensor:
    """A text ``[1, L]`` that has no padding."""
    padding, vocab_size = module.config.pad_token_id, module.config.get_text_config().vocab_size
    usable = [one for one in (token % vocab_size for token in _TOKENS) if one != padding]
    return torch.tensor([usable], device=module.device)


def _hidden_size(module: PreTrainedModel) -> int:
    return int(module.config.get_text_config().hidden_size)


def _error(ours: Tensor, theirs: Tensor) -> float:
    difference = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-6)
    return difference.nan_to_num(torch.inf).item()


class _Dense:
    """The dense layers of sentence-transformers, in float32."""

    def __init__(self, layers: tuple[nn.Module, ...]) -> None:
        self._layers = layers

    def __call__(self, states: Tensor) -> Tensor:
        states = states.float()
        for layer in self._layers:
            states = layer(states)
        return states


def _as_it_is(states: Tensor) -> Tensor:
    return states
