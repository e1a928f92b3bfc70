"""The input and output of each module of a model, in one forward of a few tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from .....shared.errors import ModelLoadError
from ...modes.causal_lm import CausalLM
from ...modes.packed import install_attention
from ...plan import NormPlan
from .matching import rows_of

_NUMBERS = itertools.count()
_NUM_TOKENS = 7
_FIRST_TOKENS = 4


@dataclass
class ModuleCall:
    """A call of a module.

    Args:
        input: its first tensor argument; None if it has none.
        output: its result, the first one of several.
        arguments, options, results: unchanged.
        norm: the plan of the module if it is a norm, valid once ``is_norm_read``.
    """

    name: str
    module: nn.Module
    input: Tensor | None
    output: Tensor | None
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: Any
    norm: NormPlan | None = None
    is_norm_read: bool = False


@dataclass
class AttentionTrace:
    """A call of transformers' attention interface; heads as ``[T, H, D]``.

    Args:
        options: all other arguments of the model.
        mask: result of the mask function that was registered for the trace.
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    options: dict[str, Any]
    mask: Any


class Trace:
    """A forward of ``module`` with a stub attention, which must be replaced afterwards.

    Positions are spread up to ``max_model_len``, to include effects that a model has only on later tokens.

    Attributes:
        calls: in the order in which they ended.
        serving_device: the device whose kernels will compute the model, wherever it is now.
    """

    def __init__(self, module: PreTrainedModel, max_model_len: int, serving_device: torch.device) -> None:
        self.module = module
        self.serving_device = serving_device
        self.calls: list[ModuleCall] = []
        self.attentions: list[AttentionTrace] = []
        self._names = {child: name for name, child in module.named_modules()}
        device = module.device
        self.positions = torch.tensor(_spread(max_model_len), device=device)
        vocab_size = module.config.get_text_config().vocab_size
        self.token_ids = (1 + torch.arange(len(self.positions), device=device)) * 7919 % vocab_size
        attention = f"penstock_trace_{next(_NUMBERS)}"
        AttentionInterface.register(attention, self._attend)
        AttentionMaskInterface.register(attention, self._make_mask)
        install_attention(module, attention)
        try:
            self.logits = self._run()
        finally:
            # The registration outlives the model.
            AttentionInterface.register(attention, _refuse)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def first_positions(self) -> Tensor:
        """The first ``positions``, to check that the others change nothing."""
        return self.positions[:_FIRST_TOKENS]

    def calls_inside(self, name: str) -> list[ModuleCall]:
        """Return the calls of modules inside the module ``name``."""
        return [call for call in self.calls if call.name.startswith(f"{name}.")]

    def calls_of(self, name: str) -> list[ModuleCall]:
        """Return the calls of the module ``name``."""
        return [call for call in self.calls if call.name == name]

    def input_of(self, name: str) -> Tensor:
        """Return the first input of the module ``name``, ``[T, E]``.

        Raises:
            ModelLoadError: it is no tensor; the same holds for ``output_of``.
        """
        return rows_of(some(self.calls_of(name)[0].input))

    def output_of(self, name: str) -> Tensor:
        """Return the output of the first call of the module ``name``, ``[T, E]``."""
        return rows_of(some(self.calls_of(name)[0].output))

    def _run(self) -> Tensor:
        rows = torch.arange(self.num_tokens, device=self.positions.device)
        with self.watched():
            return CausalLM(self.module).logits(
                rows,
                input_ids=self.token_ids[None],
                position_ids=self.positions[None],
                attention_mask=torch.ones_like(self.token_ids)[None],
                use_cache=False,
            )[0]

    @staticmethod
    def _make_mask(*_: Any, **__: Any) -> Any:
        """Return None as the mask, which becomes the ``mask`` of an attention."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the calls of all modules within the context."""
        handles = [child.register_forward_hook(self._record_call, with_kwargs=True) for child in self._names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record_call(
        self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], results: Any
    ) -> None:
        first_input = _first_tensor((*arguments, options.get("hidden_states"), *options.values()))
        output = _first_tensor(results if isinstance(results, tuple) else (results,))
        call = ModuleCall(self._names[module], module, first_input, output, arguments, options, results)
        self.calls.append(call)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Attend causally, whatever the model's own rule. Any result is enough if it differs per token."""
        group = query.shape[1] // key.shape[1]
        scores = query.float() @ key.float().repeat_interleave(group, 1).transpose(2, 3) * query.shape[3] ** -0.5
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        output = (weights @ value.float().repeat_interleave(group, 1)).to(query.dtype).transpose(1, 2).contiguous()
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        tensors = (queries, keys, values, output[0])
        self.attentions.append(AttentionTrace(self._names[module], *tensors, options, attention_mask))
        return output, None


def some(tensor: Tensor | None) -> Tensor:
    """Return ``tensor``.

    Raises:
        ModelLoadError: it is None.
    """
    if tensor is None:
        raise ModelLoadError("one of its modules takes or makes no tensor")
    return tensor


def _refuse(*_: Any, **__: Any) -> tuple[Tensor, None]:
    raise RuntimeError("the model was traced, and has been given no attention since")


def _spread(max_model_len: int) -> list[int]:
    """Return the first few positions, and some up to the last one."""
    last = max_model_len - 1
    chosen = {*range(min(_FIRST_TOKENS, max_model_len)), last // 3, last // 2, last}
    return sorted(chosen)[-_NUM_TOKENS:] if len(chosen) <= _NUM_TOKENS else sorted(chosen)[:_NUM_TOKENS]


def _first_tensor(values: Any) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor)), None)
