"""Load a model that pools: its module, and its poolers.

A decoder is computed like those that generate. For that it gets the identity as head, so every mode for decoders, and
the compiled one, returns hidden states instead of logits.
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

# Whether a head reads the first token, the last or the mean of all is tried; the first of these that conforms is taken.
_HEAD_MODES = (CLS, LAST, MEAN)
_HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
# Operations of some families on logits after their head, and the values that disable them.
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
    """Load the module of ``model_config``: its base model, and the head of a classifier.

    Raises:
        ModelLoadError: as ``load_checkpoint``.
    """
    auto, options = _auto_class(architecture), {}
    if auto is AutoModel and "add_pooling_layer" in _parameters(model_config):
        options["add_pooling_layer"] = False  # for next-sentence prediction; many files lack it
    return load_checkpoint(
        folder,
        model_config,
        architecture,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        auto_class=auto,
        ignored_prefixes=("pooler.",),
        **options,
    )


def _auto_class(architecture: str) -> Any:
    if architecture.endswith("ForSequenceClassification"):
        return AutoModelForSequenceClassification
    if architecture.endswith("ForTokenClassification"):
        return AutoModelForTokenClassification
    return AutoModelForCausalLM if architecture.endswith(("ForCausalLM", "LMHeadModel")) else AutoModel


def _parameters(model_config: PretrainedConfig) -> set[str]:
    model_class: Any = AutoModel._model_mapping.get(type(model_config), None)
    return set(inspect.signature(model_class.__init__).parameters) if isinstance(model_class, type) else set()


def as_decoder(module: PreTrainedModel, architecture: str) -> PreTrainedModel:
    """Return the causal language model around the base model of ``module``, with the identity as head.

    Raises:
        ModelLoadError: transformers has no such class, or its logits are more than its head's output for hidden states.
    """
    base: Any = module.base_model
    try:
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(_with_plain_logits(module.config), attn_implementation="eager")
        setattr(causal, causal.base_model_prefix, base)
    except Exception as error:  # any exception of the architecture's own code
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
        raise ModelLoadError(f"{architecture} cannot be served as an embedder: it changes logits after its head")
    return causal


def _with_plain_logits(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of ``config`` without the known operations on logits after the head."""
    config = copy.deepcopy(config)
    for field, neutral in _PLAIN_LOGITS.items():
        if getattr(config, field, None) is not None:
            setattr(config, field, neutral)
    return config


def make_pooling(
    module: PreTrainedModel, settings: PoolingFolder, architecture: str, *, is_encoder: bool
) -> PoolingModel:
    """Return the poolers for the hidden states of ``module``.

    Raises:
        ModelLoadError: its head cannot be computed from the hidden states of its tokens.
    """
    if architecture.endswith("ForTokenClassification"):
        pooling = _token_classifier(module, settings, architecture, is_encoder=is_encoder)
    elif architecture.endswith("ForSequenceClassification"):
        pooling = _classifier(module, settings, architecture, is_encoder=is_encoder)
    else:
        pooling = _embedder(module, settings, is_encoder=is_encoder)
    # Models like RoBERTa, whose tokenizers also know only one type; the files of a tokenizer may say otherwise.
    return replace(pooling, distinguishes_texts=getattr(module.config, "type_vocab_size", 2) != 1)


def _embedder(module: PreTrainedModel, settings: PoolingFolder, *, is_encoder: bool) -> PoolingModel:
    mode = settings.mode or (CLS if is_encoder else LAST)
    for dense in settings.dense:
        dense.to(module.device)
    head = _Dense(settings.dense) if settings.dense else _identity
    size = int(head(torch.zeros(1, _hidden_size(module), device=module.device)).shape[-1])
    setup = PoolingSetup(
        dimensions=size,
        matryoshka_dimensions=matryoshka_of(module.config),
        prompts=settings.prompts or {},
        default_prompt_name=settings.default_prompt_name,
    )
    ends = {"finish": normalize, "finishes": settings.normalize, "is_cut": True}
    poolers = {
        "embed": Pooler(ROWS_OF_MODE[mode], is_per_token=False, head=head, **ends),
        "token_embed": Pooler(Rows.ALL, is_per_token=True, head=head, **ends),
    }
    return PoolingModel(poolers, setup, is_encoder)


def _classifier(
    module: PreTrainedModel, settings: PoolingFolder, architecture: str, *, is_encoder: bool
) -> PoolingModel:
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
    return PoolingModel({"classify": pooler}, _class_setup(module, settings, theirs.shape[-1]), is_encoder)


def _token_classifier(
    module: PreTrainedModel, settings: PoolingFolder, architecture: str, *, is_encoder: bool
) -> PoolingModel:
    token_ids = _token_ids(module)
    states = module.base_model(input_ids=token_ids).last_hidden_state[0]
    theirs, head = module(input_ids=token_ids).logits[0], OwnHead(module)
    if _error(head(states), theirs) > _HEAD_TOLERANCE[module.dtype]:
        raise ModelLoadError(f"{architecture} cannot be served: its head looks at more than a token's hidden state")
    pooler = _class_pooler(module, Rows.ALL, head, theirs.shape[-1], is_per_token=True)
    return PoolingModel({"token_classify": pooler}, _class_setup(module, settings, theirs.shape[-1]), is_encoder)


def _class_pooler(module: PreTrainedModel, rows: Rows, head: Any, num_labels: int, *, is_per_token: bool) -> Pooler:
    activation = class_activation(module.config, num_labels)
    return Pooler(rows, is_per_token, head, activation, finishes=True, is_cut=False)


def _class_setup(module: PreTrainedModel, settings: PoolingFolder, num_labels: int) -> PoolingSetup:
    return PoolingSetup(
        labels=labels_of(module.config, num_labels),
        prompts=settings.prompts or {},
        default_prompt_name=settings.default_prompt_name,
    )


def _own_logits(module: PreTrainedModel, token_ids: Tensor) -> Tensor:
    return module(input_ids=token_ids).logits


def _token_ids(module: PreTrainedModel) -> Tensor:
    """Return a text ``[1, L]`` without padding."""
    padding, vocab_size = module.config.pad_token_id, module.config.get_text_config().vocab_size
    usable = [token_id for token_id in (token % vocab_size for token in _TOKENS) if token_id != padding]
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


def _identity(states: Tensor) -> Tensor:
    return states
