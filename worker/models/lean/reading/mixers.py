"""What a layer does that has no attention: by the projections that it calls, its convolution, and its vectors.

Which vector is which, and what lies where in a row, is found out by trying: what comes of a guess has to be what the
model's output projection was given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from .....kernels.mixers import MixerKind, MixerState, MixingBatch, has_kernel, mix
from .....shared.errors import ModelLoadError
from ...plan import MixerPlan
from ..layers.mixing import make_weights, tensors_of
from .matching import error_of, rows_of, same, tolerance_for
from .norms import eps_of
from .trace import ModuleCall, Trace

# Steps of a scan may have a lower bound; it is below this.
_LARGEST_SMALL_STEP = 0.01


def read_mixer(trace: Trace, call: ModuleCall) -> MixerPlan:
    """The plan of the module that ``call`` is.

    Raises:
        ModelLoadError: it is none that the kernels compute, or they are not made for this device.
    """
    found = _Parts.of(trace, call)
    tried = None
    for guess in found.guesses():
        weights = make_weights(guess, tensors_of(trace.module, guess))
        if not has_kernel(weights, found.rows.device, found.rows.dtype):
            tried = (
                "are mixed by compiled kernels alone, which there are none of for this device, dtype or size of heads"
            )
            continue
        tried = "are not mixed in a known way"
        state = MixerState.allocate(weights, 1, found.rows.dtype, found.rows.device)
        batch = MixingBatch(*(torch.tensor([number]) for number in (len(found.rows), -1, 0)))
        # Guesses are few, and each is far from the others; the first that fits is taken, since large ones take long.
        if error_of(mix(found.rows, weights, state, batch), found.made) <= tolerance_for(found.made):
            return guess
    kind = type(call.module).__name__
    raise ModelLoadError(f"the tokens of {kind} {tried or 'meet in a way that is not known'}")


@dataclass
class _Parts:
    """What a module is made of.

    Args:
        rows: what its projections make, side by side; ``sizes`` of each.
        made: what its output projection was given.
        vectors: names of its own parameters of one number a head, in their order.
        norm: the module of a gated normalisation, and its name.
        small_numbers: which the configuration has.
    """

    rows: Tensor
    sizes: list[int]
    made: Tensor
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
        linears = [one for one in trace.inside(call.name) if isinstance(one.module, nn.Linear)]
        given = [one for one in linears if same(one.given, call.given)]
        output = next((one for one in linears if one not in given and same(one.made, call.made)), None)
        children = list(call.module.named_children())
        convolutions = [(name, child) for name, child in children if isinstance(child, nn.Conv1d)]
        if output is None or not given or len(convolutions) != 1 or output.given is None:
            raise ModelLoadError(f"{kind} is no convolution between two projections")
        (convolution, module), parent = convolutions[0], call.name
        if module.groups != module.in_channels or module.in_channels != module.out_channels:
            raise ModelLoadError(f"the convolution of {kind} mixes channels")
        own = [name for name, parameter in call.module.named_parameters(recurse=False) if parameter.ndim == 1]
        vectors = [getattr(call.module, name) for name in own]
        if len({len(vector) for vector in vectors}) > 1:
            raise ModelLoadError(f"{kind} has vectors of several sizes")
        norms = [(name, child) for name, child in children if not isinstance(child, nn.Linear | nn.Conv1d)]
        norms = [(name, child) for name, child in norms if isinstance(getattr(child, "weight", None), Tensor)]
        made = [rows_of(one.made) for one in given if one.made is not None]
        return cls(
            rows=torch.cat(made, dim=1).contiguous(),
            sizes=[part.shape[1] for part in made],
            made=rows_of(output.given),
            inner=tuple(one.name for one in given),
            output=output.name,
            convolution=f"{parent}.{convolution}",
            num_channels=module.in_channels,
            vectors=[f"{parent}.{name}" for name in own],
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
        for gate, one, other in ((1, 0, 2), (0, 1, 2), (2, 0, 1)):
            yield MixerPlan(
                *(MixerKind.CONVOLUTION, self.inner, self.output, self.convolution),
                values_at=one * size,
                gate_at=gate * size,
                strength_at=other * size,
            )

    def _delta_rules(self) -> Iterator[MixerPlan]:
        values, heads = self.made.shape[1], self.num_heads
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
        """Where a delta rule's values and gates begin, and its strengths and steps in either order: all of a group
        together."""
        small_at = self.num_channels + self.made.shape[1]
        return 0, self.num_channels, [small_at, small_at + self.num_heads]

    def _places_by_parts(self) -> tuple[int, int, list[int]] | None:
        """The same where each part has a projection of its own; None if those here are not of its sizes."""
        values, heads = self.made.shape[1], self.num_heads
        if sorted(self.sizes) != sorted([self.num_channels, values, heads, heads]):
            return None
        starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        by_size = {size: [at for at, own in zip(starts, self.sizes, strict=True) if own == size] for size in self.sizes}
        return by_size[self.num_channels][0], by_size[values][0], by_size[heads]

    def _scans(self) -> Iterator[MixerPlan]:
        values, heads = self.made.shape[1], self.num_heads
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
            *(kind, self.inner, self.output, self.convolution, values_at, gate_at),
            num_heads=self.num_heads,
            head_dim=self.made.shape[1] // self.num_heads,
            norm=self.norm,
            eps=eps_of(self.norm_module)[0],
            **fields,
        )


def _small_numbers(config: PretrainedConfig) -> list[float]:
    values: Any = vars(config.get_text_config()).values()
    return sorted({value for value in values if isinstance(value, float) and 0 < value <= _LARGEST_SMALL_STEP})


def _orders(names: list[str], likely: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    """``names`` in every order, the ``likely`` one first: in a model that was not trained several may be alike."""
    first = tuple(names[index] for index in likely)
    yield first
    yield from (order for order in itertools.permutations(names) if order != first)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
