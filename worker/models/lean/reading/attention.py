"""Read how a layer computes the inputs of the attention interface from its own input, and its rotary angles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from .....kernels.decoder import AttentionGate
from .....shared.errors import ModelLoadError
from ...plan import AnglesPlan, AttentionPlan, NormPlan, RotationPlan
from ..layers.rotation import angles_of, as_halves, rotate
from .norms import read_norm
from .trace import AttentionTrace, ModuleCall, Trace, best, close, rows_of, same, some

_QUERY, _KEY = 0, 1


@dataclass
class AnglesSource:
    """A way in which the model computes angles, and those of the traced tokens, ``[T, R]`` each."""

    plan: AnglesPlan
    cos: Tensor
    sin: Tensor


def read_attention(
    trace: Trace, call: ModuleCall, sources: list[AnglesSource], output: ModuleCall | None = None
) -> AttentionPlan:
    """Return the plan of the attention module ``call``.

    Args:
        output: the projection after it, if the module does not contain it.

    Raises:
        ModelLoadError: it does something that no field of a plan describes.
    """
    (attention,) = [each for each in trace.attentions if each.name == call.name]
    inner = trace.calls_inside(call.name)
    assert call.input is not None
    projected = _projected(trace, _linears_of(inner, call.input), attention)
    output = output or _output_of(inner, attention, call, projected.opens)
    value_norm, value_call = _value_norm_of(inner, attention, projected)
    norms = _HeadNorms.of(
        [norm_call for norm_call in inner if norm_call is not value_call], attention, has_keys=projected.key is not None
    )
    match = _find_rotation(attention, projected.query, projected.key, norms, sources)
    if match is None:
        raise ModelLoadError(f"{type(call.module).__name__} does more to queries and keys than normalise and rotate")
    rotation, follows = match
    sinks = attention.options.get("s_aux")
    scale = attention.options.get("scaling")
    dims = attention.query.shape[2]
    return AttentionPlan(
        qkv=projected.names,
        output=output.name,
        num_heads=attention.query.shape[1],
        num_kv_heads=attention.key.shape[1],
        head_dim=dims,
        scale=dims**-0.5 if scale is None else float(scale),
        query_norm=norms.plans[_QUERY] if norms else None,
        key_norm=norms.plans[_KEY] if norms else None,
        norms_rows=norms is not None and norms.span_rows,
        norms_follow=follows,
        rotation=rotation,
        softcap=attention.options.get("softcap"),
        sinks=None if sinks is None else _name_of_parameter(call, sinks),
        gate=projected.gate,
        value_norm=value_norm,
        values_are_keys=projected.values_are_keys,
        source=projected.source,
    )


def _linears_of(calls: list[ModuleCall], inputs: Tensor) -> list[ModuleCall]:
    return [call for call in calls if isinstance(call.module, nn.Linear) and same(call.input, inputs)]


@dataclass
class _Projected:
    """The outputs of the projections.

    Args:
        names: of the projections.
        query, key, value: as projected, ``[T, heads, D]``. Key and value are None if those of layer ``source`` are
            used.
        gate: see ``AttentionPlan``.
        opens: logits of the gate on the attention output, ``[T, H * D]``.
    """

    names: tuple[str, ...]
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    gate: AttentionGate = AttentionGate.NONE
    opens: Tensor | None = None
    values_are_keys: bool = False
    source: int | None = None


def _projected(trace: Trace, projections: list[ModuleCall], attention: AttentionTrace) -> _Projected:
    num_heads, dims = attention.query.shape[1:]
    num_kv_heads = attention.key.shape[1]
    if attention.value.shape != attention.key.shape:
        raise ModelLoadError("its keys and values are of different sizes")
    names = tuple(call.name for call in projections)
    outputs = [rows_of(call.output) for call in projections if call.output is not None]
    sizes = [num_heads * dims, num_kv_heads * dims, num_kv_heads * dims]
    gate, opens = AttentionGate.NONE, None
    if len(outputs) == 4 and outputs[3].shape[1] in (num_heads, num_heads * dims):
        *outputs, opens = outputs
        gate = AttentionGate.PER_HEAD if opens.shape[1] == num_heads else AttentionGate.PER_ELEMENT
        opens = opens.repeat_interleave(num_heads * dims // opens.shape[1], dim=1)
    widths = [output.shape[1] for output in outputs]
    if widths == sizes[:1] and (source := _source_of(trace, attention)) is not None:
        return _Projected(names, outputs[0].unflatten(1, (-1, dims)), None, None, source=source)
    if widths == [sum(sizes)]:
        outputs = list(outputs[0].split(sizes, dim=1))
    elif widths == [2 * sizes[0], *sizes[1:]]:
        both = outputs[0].unflatten(1, (num_heads, 2 * dims))
        outputs[0], opens = (part.flatten(1) for part in both.chunk(2, dim=2))
        gate = AttentionGate.WITH_QUERY
    elif widths != sizes and widths != sizes[:2]:
        raise ModelLoadError("its queries, keys and values are not three projections of one input, or one")
    query, key, value = (part.unflatten(1, (-1, dims)) for part in (*outputs[:2], outputs[-1]))
    return _Projected(names, query, key, value, gate, opens, values_are_keys=len(outputs) == 2)


def _source_of(trace: Trace, attention: AttentionTrace) -> int | None:
    """Return the index of the earlier layer that has the same keys and values; None if there is none."""
    layer = attention.name.rpartition(".")[0]
    list_name = layer.rpartition(".")[0]
    layers = [call.name for call in trace.calls if call.name.rpartition(".")[0] == list_name]
    for earlier in trace.attentions:
        if earlier is attention:
            return None
        if same(earlier.key, attention.key) and same(earlier.value, attention.value):
            return layers.index(earlier.name.rpartition(".")[0])
    return None


def _value_norm_of(
    inner: list[ModuleCall], attention: AttentionTrace, projected: _Projected
) -> tuple[NormPlan | None, ModuleCall | None]:
    """Return the norm of values, and its call; None if they are not normalised, or are another layer's."""
    if projected.value is None or same(projected.value, attention.value):
        return None, None
    for call in inner:
        if call.input is None or call.output is None or not same(rows_of(call.output), attention.value):
            continue
        if same(rows_of(call.input), projected.value) and (plan := read_norm(call)):
            return plan, call
    raise ModelLoadError("its values are not what their projection makes")


def _output_of(
    calls: list[ModuleCall], attention: AttentionTrace, whole: ModuleCall, gate: Tensor | None
) -> ModuleCall:
    attention_out, agree = attention.output.flatten(1), same
    if gate is not None:
        attention_out, agree = attention_out * gate.sigmoid(), close
    for call in calls:
        if not isinstance(call.module, nn.Linear) or call.input is None or call.output is None:
            continue
        if agree(rows_of(call.input), attention_out) and same(call.output, whole.output):
            return call
    raise ModelLoadError("there is more than one projection behind its attention")


@dataclass
class _HeadNorms:
    """Norms of queries and keys, or of queries only: their plans, and the calls they were read from."""

    plans: tuple[NormPlan, NormPlan | None]
    calls: tuple[ModuleCall, ...]
    span_rows: bool

    @classmethod
    def of(cls, inner: list[ModuleCall], attention: AttentionTrace, *, has_keys: bool) -> _HeadNorms | None:
        read = [(call, plan) for call in inner if (plan := read_norm(call)) is not None]
        if not read:
            return None
        if not has_keys and len(read) == 1 and read[0][1].size == attention.query.shape[2]:
            ((call, plan),) = read
            return cls((plan, None), (call,), span_rows=False)
        if len(read) != 2:
            raise ModelLoadError(
                f"{len(read)} normalisations inside of its attention, not one for queries and keys each"
            )
        (query, query_plan), (key, key_plan) = read
        rows = (attention.query.shape[1] * query_plan.size, attention.key.shape[1] * key_plan.size)
        if query_plan.size == key_plan.size == attention.query.shape[2]:
            span_rows = False
        elif (query_plan.size, key_plan.size) == tuple(
            tensor.shape[1] * tensor.shape[2] for tensor in (attention.query, attention.key)
        ):
            span_rows = True
        else:
            raise ModelLoadError(f"normalisations of {rows} numbers inside of its attention")
        if query_plan.is_wide != key_plan.is_wide:  # with weights near 1 in 16 bits only rounding distinguishes them
            query_plan, key_plan = (replace(plan, is_wide=True) for plan in (query_plan, key_plan))
        if replace(query_plan, name="", size=0) != replace(key_plan, name="", size=0):
            raise ModelLoadError("queries and keys are normalised in two ways")
        if any(getattr(call.module, "bias", None) is not None for call in (query, key)):
            raise ModelLoadError("normalisations inside of its attention add a bias")
        return cls((query_plan, key_plan), (query, key), span_rows)

    def apply(self, which: int, heads: Tensor) -> Tensor:
        """Normalise heads ``[T, H, D]`` by the model's own module."""
        module = self.calls[which].module
        if self.span_rows:
            return module(heads.flatten(1)[None])[0].unflatten(1, heads.shape[1:])
        return module(heads[None])[0]


def _find_rotation(
    attention: AttentionTrace,
    query: Tensor,
    key: Tensor | None,
    norms: _HeadNorms | None,
    sources: list[AnglesSource],
) -> tuple[RotationPlan | None, bool] | None:
    """Return how heads are rotated, and whether norms follow the rotation; None if neither is known.

    Args:
        key: None if another layer's keys are used.
    """
    dims = query.shape[2]
    kinds = [query] if key is None else [query, key]

    def guesses() -> Iterator[tuple[RotationPlan | None, bool]]:
        yield None, False
        orders = (False, True) if norms else (False,)
        for (index, source), is_interleaved, follows in itertools.product(enumerate(sources), (False, True), orders):
            if source.cos.shape[1] <= dims:
                yield RotationPlan(index, is_interleaved), follows

    def compute_rotation(guess: tuple[RotationPlan | None, bool]) -> Tensor:
        rotation, follows = guess
        results = []
        for which, heads in enumerate(kinds):
            if norms and not follows:
                heads = norms.apply(which, heads)
            if rotation is not None:
                source = sources[rotation.source]
                heads = rotate(heads, source.cos, source.sin, rotation)
            if norms and follows:
                heads = norms.apply(which, heads)
            results.append(heads)
        return _balanced(results, attention)

    return best(guesses(), compute_rotation, _balanced([attention.query, attention.key][: len(kinds)], attention))


def _balanced(kinds: list[Tensor], attention: AttentionTrace) -> Tensor:
    """Concatenate queries and keys, each token's part scaled to one size, so that a wrong part is not outweighed by
    larger ones.
    """
    sizes = (heads.float().norm(dim=-1, keepdim=True).clamp(min=1e-12) for heads in (attention.query, attention.key))
    parts = [heads.float() / size for heads, size in zip(kinds, sizes, strict=False)]
    return torch.cat(parts, dim=1).to(kinds[0].dtype)


def _name_of_parameter(call: ModuleCall, tensor: Tensor) -> str:
    for name, parameter in call.module.named_parameters():
        if parameter is tensor or (parameter.shape == tensor.shape and same(parameter, tensor)):
            return f"{call.name}.{name}"
    raise ModelLoadError("its attention sinks are no parameter of it")


def sources_of(call: ModuleCall, trace: Trace) -> list[AnglesSource]:
    """Return the readings of the output of ``call`` as angles of ``trace.positions``; empty if it is something else."""
    cos_and_sin = _as_angles(call, trace.num_tokens)
    if cos_and_sin is None:
        return []
    arguments = [value for value in call.arguments[1:] if not isinstance(value, Tensor)]
    options = {name: value for name, value in call.options.items() if not isinstance(value, Tensor)}
    base = AnglesPlan(call.name, tuple(arguments), tuple(options.items()))
    sources = []
    for stride, repeats in ((1, True), (2, True), (1, False)):
        plan = AnglesPlan(base.name, base.arguments, base.options, stride, repeats)
        cos, sin = (as_halves(angles, plan) for angles in cos_and_sin)
        if _has_equal_halves(rows_of(cos_and_sin[0]), cos, plan) and _is_token_wise(call, plan, trace, cos):
            sources.append(AnglesSource(plan, cos, sin))
    return sources


def _as_angles(call: ModuleCall, num_tokens: int) -> tuple[Tensor, Tensor] | None:
    results: Any = call.results
    if not isinstance(results, tuple) or len(results) != 2 or not all(isinstance(each, Tensor) for each in results):
        return None
    cos, sin = results
    is_of_tokens = cos.shape == sin.shape and cos.dim() in (2, 3) and cos.shape[-2] == num_tokens
    if not is_of_tokens or not bool(((cos.float() ** 2 + sin.float() ** 2).std(-1) < 0.05).all()):
        return None
    return (cos, sin) if cos.dim() == 2 or cos.shape[0] == 1 else None


def _has_equal_halves(columns: Tensor, cos: Tensor, plan: AnglesPlan) -> bool:
    """Whether columns that are read as one angle are equal."""
    if not plan.repeats:
        return True
    if plan.stride == 2:
        return torch.equal(columns[:, ::2], columns[:, 1::2])
    first, second = columns.chunk(2, dim=1)
    return torch.equal(first, second)


def _is_token_wise(call: ModuleCall, plan: AnglesPlan, trace: Trace, cos: Tensor) -> bool:
    """Whether the angles of a token do not depend on the longest request of a step.

    Raises:
        ModelLoadError: they do.
    """
    try:
        alone, _ = angles_of(call.module, plan, some(call.input), trace.first_positions)
    except Exception:  # its arguments are others than hidden states and positions, so it computes no angles
        return False
    if not close(alone, cos[: len(alone)]):
        raise ModelLoadError(
            "the angles of its rotary embedding follow the longest request of a step; with a max_model_len that needs "
            "no scaling they would not"
        )
    return True
