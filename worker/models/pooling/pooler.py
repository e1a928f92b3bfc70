"""From hidden states to results: which tokens count, how they are pooled, and the operations after pooling."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ....shared.errors import ValidationError
from ....shared.params.pooling import Pooled, PoolingParams, PoolingSetup
from ....shared.values.shown import shown
from .folder import CLS, LAST, MEAN

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPooling

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def with_parts(module: AnyModule, parts: Mapping[str, nn.Module]) -> AnyModule:
    """Return a copy of ``module`` with other modules under these names, which shares everything else."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    for name, part in parts.items():
        first, _, rest = name.partition(".")
        inner = copied._modules[first]
        assert inner is not None
        copied._modules[first] = with_parts(inner, {rest: part}) if rest else part
    return copied


class Rows(enum.Enum):
    """The tokens of a prompt whose hidden states are needed."""

    FIRST = "first"
    LAST = "last"
    ALL = "all"


ROWS_OF_MODE = {CLS: Rows.FIRST, LAST: Rows.LAST, MEAN: Rows.ALL}


@dataclass(frozen=True)
class Pooler:
    """Computes the result of one task from the hidden states of prompts.

    Args:
        rows: tokens that it reads.
        is_per_token: one result per token instead of one per prompt.
        head: ``[N, H]`` to ``[N, D]``.
        finish: last operation on embeddings (of any shape, ``D`` last) or classes.
        finishes: whether ``finish`` is applied if a request does not say so by ``use_activation``.
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
        """Whether it does not need the hidden states of a prompt's first tokens."""
        return self.rows is Rows.LAST

    def __call__(self, states: Sequence[Tensor], params: Sequence[PoolingParams]) -> list[Pooled]:
        """Pool prompts whose hidden states of ``rows`` are ``[R, H]`` each."""
        if self.is_per_token:
            rows = self.head(torch.cat(list(states)))
            results = list(rows.split([len(state) for state in states]))
        else:
            results = list(self.head(torch.stack([state.float().mean(0).to(state.dtype) for state in states])))
        return [
            self._make_result(result.float(), request_params)
            for result, request_params in zip(results, params, strict=True)
        ]

    def _make_result(self, result: Tensor, params: PoolingParams) -> Pooled:
        if params.dimensions is not None and self.is_cut:
            result = result[..., : params.dimensions]
        if self.finishes if params.use_activation is None else params.use_activation:
            result = self.finish(result)
        array = result.cpu().numpy().astype("<f4", copy=False)
        return Pooled(data=array.tobytes(), shape=array.shape)


def normalize(embeddings: Tensor) -> Tensor:
    """Scale embeddings to length one."""
    return nn.functional.normalize(embeddings, dim=-1)


@dataclass(frozen=True)
class PoolingModel:
    """The poolers of a loaded model by task; the first is its own.

    Args:
        is_encoder: each token attends to its whole text, which is therefore computed in one step.
        distinguishes_texts: tokens of the second text of a pair have another type than those of the first.
    """

    poolers: dict[str, Pooler]
    setup: PoolingSetup
    is_encoder: bool
    distinguishes_texts: bool = True

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.poolers)

    def check(self, params: PoolingParams) -> None:
        """Raise ``ValidationError`` unless the model supports the request."""
        check_pooling(params, self.tasks, self.setup)


def check_pooling(params: PoolingParams, tasks: Sequence[str], setup: PoolingSetup) -> None:
    """Reject a request that a model does not support.

    Raises:
        ValidationError: another task than its own, or embeddings cut to a size that it was not trained for.
    """
    if params.task is not None and params.task not in tasks:
        raise ValidationError(f"task must be one of {', '.join(tasks)} for this model, got {shown(params.task)}")
    dimensions = params.dimensions
    if dimensions is None:
        return
    if not setup.dimensions:
        raise ValidationError(f"dimensions={dimensions} is for embeddings, and this model makes none; leave it out")
    allowed = setup.matryoshka_dimensions
    if dimensions > setup.dimensions or (allowed is not None and dimensions not in allowed):
        allowed_text = f"one of {', '.join(map(str, allowed))}" if allowed else f"at most {setup.dimensions}"
        raise ValidationError(f"dimensions must be {allowed_text} for this model, got {dimensions}")


class OwnHead:
    """The head of a classifier by its own code: everything in ``module`` after its base model.

    Its input is one hidden state per text, as if the text had only one token.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._base = module.base_model
        self._base_output = _FixedOutput()
        self._module = with_parts(module, {module.base_model_prefix: self._base_output})

    def __call__(self, states: Tensor) -> Tensor:
        """Compute logits ``[N, C]`` of hidden states ``[N, H]``."""
        hidden = states[:, None]
        pooler: Any = getattr(self._base, "pooler", None)
        # Imported late, since models without such a head need no transformers.
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        self._base_output.output = BaseModelOutputWithPooling(
            last_hidden_state=hidden,
            pooler_output=None if pooler is None else pooler(hidden),
        )
        ones = torch.ones(hidden.shape[:2], dtype=torch.int64, device=states.device)
        logits = self._module(input_ids=ones, attention_mask=ones).logits
        return logits[:, 0] if logits.dim() == 3 else logits


class _FixedOutput(nn.Module):
    """Replaces a base model and returns an output that was set."""

    output: BaseModelOutputWithPooling

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPooling:
        return self.output
