"""From hidden states to results: which tokens count, how they are pooled, and what follows pooling."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ....shared.errors import ValidationError
from ....shared.params.pooling import Pooled, PoolingParams, PoolingSetup
from ....shared.values.shown import shown
from .folder import CLS, LAST, MEAN

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def with_parts(module: AnyModule, parts: Mapping[str, nn.Module]) -> AnyModule:
    """A copy of ``module`` that has other modules under these names, and shares all that it has else."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    for name, part in parts.items():
        first, _, rest = name.partition(".")
        inner = made._modules[first]
        assert inner is not None
        made._modules[first] = with_parts(inner, {rest: part}) if rest else part
    return made


class Rows(enum.Enum):
    """Of which tokens of a prompt the hidden states are wanted."""

    FIRST = "first"
    LAST = "last"
    ALL = "all"


ROWS_OF_MODE = {CLS: Rows.FIRST, LAST: Rows.LAST, MEAN: Rows.ALL}


@dataclass(frozen=True)
class Pooler:
    """What one task makes of the hidden states of prompts.

    Args:
        rows: which tokens it looks at.
        is_per_token: there is a result for each token, and not one for all.
        head: ``[N, H]`` to ``[N, D]``.
        finish: what embeddings (of any shape, ``D`` last) and classes end with, unless ``use_activation`` is False.
        is_cut: ``dimensions`` may cut the result.
    """

    rows: Rows
    is_per_token: bool
    head: Callable[[Tensor], Tensor]
    finish: Callable[[Tensor], Tensor]
    finishes: bool
    is_cut: bool

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it can do without the hidden states of a prompt's beginning."""
        return self.rows is Rows.LAST

    def __call__(self, states: Sequence[Tensor], params: Sequence[PoolingParams]) -> list[Pooled]:
        """Pool prompts whose hidden states, ``[R, H]`` each, are those of ``rows``."""
        if self.is_per_token:
            rows = self.head(torch.cat(list(states)))
            results = list(rows.split([len(one) for one in states]))
        else:
            results = list(self.head(torch.stack([one.float().mean(0).to(one.dtype) for one in states])))
        return [self._end(result.float(), wanted) for result, wanted in zip(results, params, strict=True)]

    def _end(self, result: Tensor, params: PoolingParams) -> Pooled:
        if params.dimensions is not None and self.is_cut:
            result = result[..., : params.dimensions]
        if self.finishes if params.use_activation is None else params.use_activation:
            result = self.finish(result)
        array = result.cpu().numpy().astype("<f4", copy=False)
        return Pooled(data=array.tobytes(), shape=array.shape)


def normalize(embeddings: Tensor) -> Tensor:
    """Give embeddings the length one."""
    return nn.functional.normalize(embeddings, dim=-1)


@dataclass(frozen=True)
class PoolingModel:
    """What a loaded model that pools does with its hidden states, by task; the first is its own.

    Args:
        is_encoder: each token sees all of its text, which is therefore computed in one step.
        tells_texts_apart: tokens of the second text of a pair are of another type than those of the first.
    """

    poolers: dict[str, Pooler]
    setup: PoolingSetup
    is_encoder: bool
    tells_texts_apart: bool = True

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.poolers)

    def check(self, params: PoolingParams) -> None:
        """Raises ``ValidationError`` unless it can do what is asked."""
        check_pooling(params, self.tasks, self.setup)


def check_pooling(params: PoolingParams, tasks: Sequence[str], setup: PoolingSetup) -> None:
    """Refuse what a model does not do.

    Raises:
        ValidationError: another task than its own, or embeddings cut to what it was not trained for.
    """
    if params.task is not None and params.task not in tasks:
        raise ValidationError(f"task must be one of {', '.join(tasks)} for this model, got {shown(params.task)}")
    wanted = params.dimensions
    if wanted is None:
        return
    if not setup.dimensions:
        raise ValidationError(f"dimensions={wanted} is for embeddings, and this model makes none; leave it out")
    allowed = setup.matryoshka_dimensions
    if wanted > setup.dimensions or (allowed is not None and wanted not in allowed):
        told = f"one of {', '.join(map(str, allowed))}" if allowed else f"at most {setup.dimensions}"
        raise ValidationError(f"dimensions must be {told} for this model, got {wanted}")


class OwnHead:
    """The head of a classifier by its own code: what ``module`` does after its base model.

    It is given one hidden state for each text, as if the text had but one token.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._base = module.base_model
        self._given = _Given()
        self._module = with_parts(module, {module.base_model_prefix: self._given})

    def __call__(self, states: Tensor) -> Tensor:
        """``[N, H]`` to logits ``[N, C]``."""
        hidden = states[:, None]
        pooler: Any = getattr(self._base, "pooler", None)
        self._given.output = BaseModelOutputWithPooling(
            last_hidden_state=hidden,
            pooler_output=None if pooler is None else pooler(hidden),
        )
        ones = torch.ones(hidden.shape[:2], dtype=torch.int64, device=states.device)
        logits = self._module(input_ids=ones, attention_mask=ones).logits
        return logits[:, 0] if logits.dim() == 3 else logits


class _Given(nn.Module):
    """Stands where a base model was, and says what it is told to."""

    output: BaseModelOutputWithPooling

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPooling:
        return self.output
