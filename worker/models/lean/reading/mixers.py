"""Read a layer without attention: by its projections, its convolution, and its vectors.

The role of each vector, and the offsets in a row, are found by trial: the result of a guess must be the input of the
model's output projection.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .....kernels.mixers import MixerKind, MixerState, MixingBatch, has_kernel, mix
from .....shared.errors import ModelLoadError
from ...plan import MixerPlan
from ..layers.mixing import make_weights, tensors_of
from .norms import eps_of
from .trace import ModuleCall, Trace, error_of, rows_of, same, tolerance_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Steps of a scan may have a lower bound, which is below this.
_LARGEST_SMALL_STEP = 0.01


def read_mixer(trace: Trace, call: ModuleCall) -> MixerPlan:
    """Return the plan of the module ``call``.

    Raises:
        ModelLoadError: the kernels do not support it, or are not built for this device.
    """
    parts = _Parts.of(trace, call)
    reason = None
    for guess in parts.guesses():
        weights = make_weights(guess, tensors_of(trace.module, guess))
        if not has_kernel(weights, parts.rows.device, parts.rows.dtype):
            reason = (
                "are mixed by compiled kernels alone, which there are none of for this device, dtype or size of heads"
            )
            continue
        reason = "are not mixed in a known way"
        state = MixerState.allocate(weights, 1, parts.rows.dtype, parts.rows.device)
        batch = MixingBatch(*(torch.tensor([number]) for number in (len(parts.rows), -1, 0)))
        # Guesses are few and far apart; the first that fits is taken, since large models take long.
        if error_of(mix(parts.rows, weights, state, batch), parts.mixed) <= tolerance_for(parts.mixed):
            return guess
    kind = type(call.module).__name__
    raise ModelLoadError(f"the tokens of {kind} {reason or 'meet in a way that is not known'}")


@dataclass
class _Parts:
    """The parts of a module.

    Args:
        rows: concatenated outputs of its projections; ``sizes`` of each.
        mixed: input of its output projection.
        vectors: names of its parameters with one number per head, in their order.
        norm: name of a gated norm; ``norm_module`` is the module.
        small_numbers: in the configuration.
    """

    rows: Tensor
    sizes: list[int]
    mixed: Tensor
    inner: tuple[str, ...]
    output: str
    convolution: str
    num_channels: int
    vectors: list[str]
    num_heads: int
    norm: str
    norm_module: Any
    small_numbers: list[float]

    @classmethod
    def of(cls, trace: Trace, call: ModuleCall) -> _Parts:
        kind = type(call.module).__name__
        linears = [linear for linear in trace.calls_inside(call.name) if isinstance(linear.module, nn.Linear)]
        projections = [linear for linear in linears if same(linear.input, call.input)]
        output = next(
            (linear for linear in linears if linear not in projections and same(linear.output, call.output)), None
        )
        children = list(call.module.named_children())
        convolutions = [(name, child) for name, child in children if isinstance(child, nn.Conv1d)]
        if output is None or not projections or len(convolutions) != 1 or output.input is None:
            raise ModelLoadError(f"{kind} is no convolution between two projections")
        (convolution, module), parent = convolutions[0], call.name
        if module.groups != module.in_channels or module.in_channels != module.out_channels:
            raise ModelLoadError(f"the convolution of {kind} mixes channels")
        names = [name for name, parameter in call.module.named_parameters(recurse=False) if parameter.ndim == 1]
        vectors = [getattr(call.module, name) for name in names]
        if len({len(vector) for vector in vectors}) > 1:
            raise ModelLoadError(f"{kind} has vectors of several sizes")
        norms = [(name, child) for name, child in children if not isinstance(child, nn.Linear | nn.Conv1d)]
        norms = [(name, child) for name, child in norms if isinstance(getattr(child, "weight", None), Tensor)]
        outputs = [rows_of(linear.output) for linear in projections if linear.output is not None]
        return cls(
            rows=torch.cat(outputs, dim=1).contiguous(),
            sizes=[part.shape[1] for part in outputs],
            mixed=rows_of(output.input),
            inner=tuple(linear.name for linear in projections),
            output=output.name,
            convolution=f"{parent}.{convolution}",
            num_channels=module.in_channels,
            vectors=[f"{parent}.{name}" for name in names],
            num_heads=len(vectors[0]) if vectors else 0,
            norm=f"{parent}.{norms[0][0]}" if len(norms) == 1 else "",
            norm_module=norms[0][1] if len(norms) == 1 else None,
            small_numbers=_small_numbers(trace.module.config),
        )

    def guesses(self) -> Iterator[MixerPlan]:
        if not self.vectors and sum(self.sizes) == 3 * self.num_channels:
            yield from self._convolutions()
        elif self.norm and len(self.vectors) == 2:
            yield from self._delta_rules()
        elif self.norm and len(self.vectors) == 3:
            yield from self._scans()

    def _convolutions(self) -> Iterator[MixerPlan]:
        size = self.num_channels
        for gate, first, second in ((1, 0, 2), (0, 1, 2), (2, 0, 1)):
            yield MixerPlan(
                kind=MixerKind.CONVOLUTION,
                inner=self.inner,
                output=self.output,
                convolution=self.convolution,
                values_at=first * size,
                gate_at=gate * size,
                strength_at=second * size,
            )

    def _delta_rules(self) -> Iterator[MixerPlan]:
        values, heads = self.mixed.shape[1], self.num_heads
        by_groups = self.sizes == [self.num_channels + values, 2 * heads]
        places = self._places_by_groups() if by_groups else self._places_by_parts()
        if places is None:
            return
        values_at, gate_at, small = places
        for vectors, (strength_at, step_at), groups, gates_first in itertools.product(
            _orders(self.vectors, (1, 0)), itertools.permutations(small, 2), _divisors(heads), (False, True)
        ):
            key_dim, rest = divmod(self.num_channels - values, 2 * groups)
            if rest == 0 and key_dim > 0:
                yield self._recurrence(
                    MixerKind.DELTA_RULE,
                    values_at,
                    gate_at,
                    strength_at=strength_at,
                    step_at=step_at,
                    num_groups=groups,
                    key_dim=key_dim,
                    norm_size=values // heads,
                    gates_first=gates_first,
                    decay=vectors[0],
                    step_bias=vectors[1],
                    by_groups=by_groups,
                )

    def _places_by_groups(self) -> tuple[int, int, list[int]]:
        """Return the offsets of a delta rule's values and gates, and those of its strengths and steps in either order,
        for rows computed group by group.
        """
        small_at = self.num_channels + self.mixed.shape[1]
        return 0, self.num_channels, [small_at, small_at + self.num_heads]

    def _places_by_parts(self) -> tuple[int, int, list[int]] | None:
        """Return the same for one projection per part; None if the sizes do not match."""
        values, heads = self.mixed.shape[1], self.num_heads
        if sorted(self.sizes) != sorted([self.num_channels, values, heads, heads]):
            return None
        starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        by_size = {
            size: [at for at, length in zip(starts, self.sizes, strict=True) if length == size] for size in self.sizes
        }
        return by_size[self.num_channels][0], by_size[values][0], by_size[heads]

    def _scans(self) -> Iterator[MixerPlan]:
        values, heads = self.mixed.shape[1], self.num_heads
        sizes = {"gate": values, "row": self.num_channels, "step": heads}
        if sum(self.sizes) != sum(sizes.values()):
            return
        for order, vectors, groups, gates_first, smallest in itertools.product(
            itertools.permutations(sizes),
            _orders(self.vectors, (1, 0, 2)),
            _divisors(heads),
            (True, False),
            (0.0, *self.small_numbers),
        ):
            key_dim, rest = divmod(self.num_channels - values, 2 * groups)
            if rest or key_dim <= 0:
                continue
            at = {part: sum(sizes[before] for before in order[: order.index(part)]) for part in sizes}
            for norm_size in dict.fromkeys((values // groups, values)):
                yield self._recurrence(
                    MixerKind.SCAN,
                    at["row"],
                    at["gate"],
                    step_at=at["step"],
                    num_groups=groups,
                    key_dim=key_dim,
                    norm_size=norm_size,
                    gates_first=gates_first,
                    decay=vectors[0],
                    step_bias=vectors[1],
                    skip=vectors[2],
                    smallest_step=smallest,
                )

    def _recurrence(self, kind: MixerKind, values_at: int, gate_at: int, **fields: Any) -> MixerPlan:
        return MixerPlan(
            kind=kind,
            inner=self.inner,
            output=self.output,
            convolution=self.convolution,
            values_at=values_at,
            gate_at=gate_at,
            num_heads=self.num_heads,
            head_dim=self.mixed.shape[1] // self.num_heads,
            norm=self.norm,
            eps=eps_of(self.norm_module)[0],
            **fields,
        )


def _small_numbers(config: PretrainedConfig) -> list[float]:
    values: Any = vars(config.get_text_config()).values()
    return sorted({value for value in values if isinstance(value, float) and 0 < value <= _LARGEST_SMALL_STEP})


def _orders(names: list[str], likely: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    """Yield ``names`` in every order, the ``likely`` one first, since vectors of an untrained model may be equal."""
    first = tuple(names[index] for index in likely)
    yield first
    yield from (order for order in itertools.permutations(names) if order != first)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
