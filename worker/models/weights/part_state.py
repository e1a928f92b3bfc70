"""The weights of a model that several ranks hold: what each has of them, and all of them by the checkpoint's names.

Ranks write down what they have and one of them puts it together, by files and not by collectives: what fails for want
of room on a disk is an answer then, and no rank waits for another that has raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....shared.errors import ModelLoadError
from ..lean.decoder import LeanDecoder
from ..lean.give_back import give_back
from ..loader import LoadedModel
from ..packed_linear import PackedLinear
from ..parallel.cut import cut_decoder
from ..parallel.groups import RankGroups
from ..parallel.pieces import Piece, read_pieces, write_pieces
from ..rank_checks import is_cut_by_us
from .live_state import checkpoint_state, put_tower, text_of
from .plain import put_modules

_LAYERS = "model.layers."
# What stages above the first have in the place of what the first has.
_OF_FIRST_STAGE = ("model.embed_tokens.", "lm_head.")
# Fused along the dimension that is cut.
_TWO_PARTS = "experts.gate_up_proj"


def part_path(folder: str | Path, rank: int) -> Path:
    """Where ``rank`` writes its part."""
    return Path(folder) / f"rank-{rank}.safetensors"


@torch.inference_mode()
def write_part(model: LoadedModel, make_module: Callable[[], PreTrainedModel], path: Path) -> None:
    """Write what this rank has of the weights to the file ``path``.

    Args:
        make_module: makes transformers' module of the whole model; it may be without content.

    Raises:
        ModelLoadError: the module is of another form than the model, or pieces are in a form that nobody knows.
        OSError: the file cannot be written.
    """
    groups = model.groups
    assert groups is not None, "there is one rank"
    module = make_module()
    if is_cut_by_us(module.config, model.architecture, groups.layout):
        pieces = _cut_pieces(model, text_of(model, module), groups)
    else:
        pieces = {name: _planned_piece(name, tensor) for name, tensor in _named(model.network)}
    write_pieces(path, pieces)


@torch.inference_mode()
def joined_state(
    model: LoadedModel, make_module: Callable[[], PreTrainedModel], paths: Sequence[Path]
) -> dict[str, Tensor]:
    """Return all weights of what ``write_part`` of each rank has written, as ``live_state`` has them of one rank.

    Raises:
        ModelLoadError: they are not all there, or do not fit together.
    """
    assert model.groups is not None, "there is one rank"
    module = make_module()
    text = text_of(model, module)
    shapes = {name: tensor.shape for name, tensor in _named(text)}
    for name, tensor in read_pieces(paths, model.groups.layout, shapes).items():
        holder, _, key = name.rpartition(".")
        part = text.get_submodule(holder)
        if key in part._parameters:
            part._parameters[key] = nn.Parameter(tensor, requires_grad=False)
        else:
            part._buffers[key] = tensor
    put_tower(model, module)
    return checkpoint_state(model, module)


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and kept buffers, unpacked; those that several modules share once for each of them."""
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(part, PackedLinear):
            yield from (
                (prefix + key, value) for key in ("weight", "bias") if (value := getattr(part, key)) is not None
            )
            continue
        kept = part._buffers.keys() - part._non_persistent_buffers_set
        for key, value in [*part._parameters.items(), *((key, part._buffers[key]) for key in sorted(kept))]:
            if value is not None:
                yield prefix + key, value


def _cut_pieces(model: LoadedModel, module: Any, groups: RankGroups) -> dict[str, Piece]:
    first_layer = groups.layout.stage_layers(groups.rank, module.config.num_hidden_layers).start
    cut_decoder(module, groups)
    if isinstance(model.network, LeanDecoder):
        give_back(model.network, module)
    else:
        put_modules(model.network, module)
    pieces = {}
    for name, tensor in _named(module):
        # As it is called where nothing stands around it that sums or gathers.
        name = name.replace(".inner.", ".")
        if tensor.is_meta or (name.startswith(_OF_FIRST_STAGE) and not groups.is_first_stage):
            continue
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            name = f"{_LAYERS}{int(number) + first_layer}.{rest}"
        pieces[name] = Piece(tensor, 2 if name.endswith(_TWO_PARTS) else 1)
    return pieces


def _planned_piece(name: str, tensor: Tensor) -> Piece:
    """What this rank has of a weight that is shared by transformers' plan."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return Piece(tensor)
    local = cast(Any, tensor).to_local()
    placement = placements[0]
    # torch's placement of pieces of things that are fused has no public name.
    num_parts = getattr(placement, "split_factor", 1)
    if len(placements) > 1 or not (placement.is_replicate() or hasattr(placement, "dim")):
        raise ModelLoadError(f"{name} is shared as {placements}, and nobody here can put that together")
    return Piece(local, num_parts)
