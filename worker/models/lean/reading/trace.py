"""The input and output of each module of a model, in one forward of a few tokens, and comparisons of these tensors.

A model multiplies by factors. Such a factor is measured roughly, and then taken exactly from the numbers that the
model's configuration and modules hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from .....shared.errors import ModelLoadError
from ...attention.registry import register_attention
from ...modes.packed import CausalLM, install_attention
from ...plan import NormPlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_NUMBERS = itertools.count()
_NUM_TOKENS = 7
_FIRST_TOKENS = 4
# Limits of |difference| / |tensor|. Tensors that match went through few operations, and wrong ones differ by far more.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}

Guess = TypeVar("Guess")


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
        register_attention(attention, self._attend_causally, self._make_mask)
        install_attention(module, attention)
        try:
            self.logits = self._run_module()
        finally:
            # The registration outlives the model.
            register_attention(attention, _refuse_attention)

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

    def _run_module(self) -> Tensor:
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

    def _attend_causally(
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


def _refuse_attention(*_: Any, **__: Any) -> tuple[Tensor, None]:
    raise RuntimeError("the model was traced, and has been given no attention since")


def _spread(max_model_len: int) -> list[int]:
    """Return the first few positions, and some up to the last one."""
    last = max_model_len - 1
    chosen = {*range(min(_FIRST_TOKENS, max_model_len)), last // 3, last // 2, last}
    return sorted(chosen)[-_NUM_TOKENS:] if len(chosen) <= _NUM_TOKENS else sorted(chosen)[:_NUM_TOKENS]


def _first_tensor(values: Any) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor)), None)


def error_of(ours: Tensor, theirs: Tensor) -> float:
    """Return ``|difference| / |theirs|``; infinite if shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-12)
    return error.nan_to_num(torch.inf).item()


def tolerance_for(tensor: Tensor) -> float:
    return _TOLERANCES[tensor.dtype]


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether two tensors are equal bit by bit, which shows that one module's output is another's input.

    A sum with something far smaller is close to it, so closeness would show nothing here.
    """
    return ours is not None and theirs is not None and ours.shape == theirs.shape and torch.equal(ours, theirs)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors agree except for rounding."""
    return error_of(ours, theirs) <= tolerance_for(theirs)


def best(guesses: Iterable[Guess], compute: Callable[[Guess], Tensor], output: Tensor) -> Guess | None:
    """Return the guess for which ``compute`` is closest to ``output``, the first of several; None if none is close."""
    chosen, least = None, tolerance_for(output)
    for guess in guesses:
        error = error_of(compute(guess), output)
        if error < least:
            chosen, least = guess, error
    return chosen


def rows_of(tensor: Tensor) -> Tensor:
    """Return ``[1, T, ...]`` as ``[T, ...]``."""
    return tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor


def known_numbers(module: nn.Module, config: PretrainedConfig, dtype: torch.dtype) -> list[float]:
    """Return 1, and each number of the configuration and of ``module``, with its reciprocal and root, exact and rounded
    to ``dtype``.
    """
    numbers: dict[float, None] = {1.0: None}
    values: Any = [*vars(config).values(), *vars(module).values()]
    for value in values:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            for number in (float(value), 1.0 / value, math.sqrt(value)):
                numbers[number] = None
                numbers[torch.tensor(number, dtype=dtype).item()] = None
    return list(numbers)


def factor_between(inputs: Tensor, outputs: Tensor, numbers: Iterable[float]) -> float | None:
    """Return the factor from ``inputs`` to ``outputs``; None if no number is it."""
    return best(_near(inputs, outputs, numbers), lambda number: inputs * number, outputs)


def scale_of_addition(inputs: Tensor, added: Tensor, outputs: Tensor, numbers: Iterable[float]) -> float | None:
    """Return the factor on ``added`` for which ``inputs`` + ``added`` is ``outputs``; None if no number is it."""
    near = _near(
        added, outputs.float() - inputs.float(), numbers, doubt=tolerance_for(outputs) * _size(outputs) / _size(added)
    )
    return best(near, lambda number: inputs + (added if number == 1.0 else added * number), outputs)


def read_change(inputs: Tensor, outputs: Tensor, numbers: list[float]) -> tuple[float, float | None] | None:
    """Return the factor and the cap (None for none) that turn ``inputs`` into ``outputs``; None if there are none.

    A cap hardly changes small numbers, so the closest guess is taken.
    """
    guesses: list[tuple[float, float | None]] = [(number, None) for number in _near(inputs, outputs, numbers)]
    guesses += [(1.0, number) for number in numbers if number > 1.0]

    def compute(guess: tuple[float, float | None]) -> Tensor:
        factor, cap = guess
        scaled = inputs if factor == 1.0 else inputs * factor
        return scaled if cap is None else torch.tanh(scaled / cap) * cap

    return best(guesses, compute, outputs)


def must(number: float | None, what: str) -> float:
    """Return ``number``.

    Raises:
        ModelLoadError: it is None; the message names ``what``.
    """
    if number is None:
        raise ModelLoadError(f"{what} is not what a known kind of layer makes it")
    return number


def _size(tensor: Tensor) -> float:
    return max(tensor.float().norm().item(), 1e-12)


def _near(inputs: Tensor, outputs: Tensor, numbers: Iterable[float], doubt: float = 0.0) -> Iterator[float]:
    """Yield the ``numbers`` that are close to the measured factor from ``inputs`` to ``outputs``, or within ``doubt``
    of it.
    """
    rows, targets = inputs.double().flatten(), outputs.double().flatten()
    if rows.shape != targets.shape:
        return
    measured = (rows @ targets / (rows @ rows).clamp(min=1e-30)).item()
    for number in numbers:
        if abs(number - measured) <= 0.02 * abs(measured) + doubt:
            yield number
