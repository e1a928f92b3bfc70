"""The weights of a model that several ranks hold: the pieces of each rank, and all of them by the checkpoint's names.

Each rank writes its pieces to files and one of them joins them. Files are used instead of collectives, so that a full
disk is an answer and no rank waits for another that has raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ....shared.errors import ModelLoadError
from ..lean.layers.decoder import LeanDecoder
from ..loaded import LoadedModel
from ..loading.rank_checks import is_cut_by_us
from ..parallel.cut import cut_decoder
from ..parallel.groups import RankGroups
from ..parallel.layout import ParallelLayout
from ..placing.packed_linear import PackedLinear
from .live_state import checkpoint_state, give_back, put_modules, share_vision_encoder, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYERS = "model.layers."
# Stubs that later stages have instead of the first stage's modules.
_OF_FIRST_STAGE = ("model.embed_tokens.", "lm_head.")
# Fused along the dimension that is cut.
_TWO_PARTS = "experts.gate_up_proj"


class Piece(NamedTuple):
    """The piece of a weight that a rank has.

    ``num_parts`` is the number of matrices that are concatenated in the weight, each of which is cut: 2 for the gate
    and up projection of fused experts.
    """

    tensor: Tensor
    num_parts: int = 1


def write_pieces(path: Path, pieces: Mapping[str, Piece]) -> None:
    """Write ``pieces``, by the names of weights, as a safetensors file.

    Raises:
        OSError, safetensors.SafetensorError: it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, piece in pieces.items():
        tensor = piece.tensor.detach().cpu().contiguous()
        # The format stores each byte once, and a head may be a part of the embeddings.
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    save_file(tensors, path, {name: str(piece.num_parts) for name, piece in pieces.items() if piece.num_parts > 1})


def read_pieces(paths: Sequence[Path], layout: ParallelLayout, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Join the pieces that the ranks of ``layout`` have written to ``paths``, in their order.

    Args:
        shapes: of the whole weights. Weights of which no rank has a piece are left out.

    Returns:
        Weights that are whole in a file are views of it: the files may be unlinked, but not changed.

    Raises:
        ModelLoadError: the pieces of a weight do not fit its shape.
    """
    with ExitStack() as stack:
        files: list[Any] = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        names = [set(file.keys()) for file in files]
        whole: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            # Several stages may have the same norm; ranks of one stage have pieces of one weight.
            stages = ([rank for rank in ranks if name in names[rank]] for ranks in layout.tensor_groups)
            if owners := next(filter(None, stages), None):
                num_parts = int((files[owners[0]].metadata() or {}).get(name, "1"))
                whole[name] = join([files[rank].get_tensor(name) for rank in owners], shape, name, num_parts)
        return whole


def join(pieces: Sequence[Tensor], shape: torch.Size, name: str, num_parts: int = 1) -> Tensor:
    """Return the weight of ``shape`` that consists of ``pieces``, in the order of their ranks.

    They are concatenated along one dimension. Adjacent ranks may have the same piece, and all ranks the whole weight.

    Raises:
        ModelLoadError: they do not fit; the message names the weight.
    """
    first = pieces[0]
    if first.shape == shape:
        return first
    differing = [dim for dim in range(len(shape)) if dim >= first.ndim or first.shape[dim] != shape[dim]]
    if first.ndim == len(shape) and len(differing) == 1:
        dim = differing[0]
        num_copies = max(1, sum(piece.shape[dim] for piece in pieces) // shape[dim])
        parts = [piece.chunk(num_parts, dim) for piece in pieces[::num_copies]]
        joined = torch.cat([part[number] for number in range(num_parts) for part in parts], dim)
        if joined.shape == shape:
            return joined
    shapes = ", ".join(str(tuple(piece.shape)) for piece in pieces)
    raise ModelLoadError(f"{name} is {tuple(shape)} in the model, and the ranks have {shapes} of it")


def part_path(folder: str | Path, rank: int) -> Path:
    """Return the file for the part of ``rank``."""
    return Path(folder) / f"rank-{rank}.safetensors"


@torch.inference_mode()
def write_part(model: LoadedModel, make_module: Callable[[], PreTrainedModel], path: Path) -> None:
    """Write this rank's pieces of the weights to the file ``path``.

    Args:
        make_module: creates transformers' module of the whole model, with or without content.

    Raises:
        ModelLoadError: the module has another form than the model, or pieces have an unknown form.
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
    """Return all weights that ``write_part`` of each rank has written, in the form of ``live_state``.

    Raises:
        ModelLoadError: some are missing, or do not fit.
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
    share_vision_encoder(model, module)
    return checkpoint_state(model, module)


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers, unpacked; shared ones once per module."""
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(part, PackedLinear):
            yield from (
                (prefix + key, value) for key in ("weight", "bias") if (value := getattr(part, key)) is not None
            )
            continue
        persistent = part._buffers.keys() - part._non_persistent_buffers_set
        for key, value in [*part._parameters.items(), *((key, part._buffers[key]) for key in sorted(persistent))]:
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
        # The name without the wrapper that sums or concatenates.
        name = name.replace(".inner.", ".")
        if tensor.is_meta or (name.startswith(_OF_FIRST_STAGE) and not groups.is_first_stage):
            continue
        if name.startswith(_LAYERS):
            number, _, rest = name.removeprefix(_LAYERS).partition(".")
            name = f"{_LAYERS}{int(number) + first_layer}.{rest}"
        pieces[name] = Piece(tensor, 2 if name.endswith(_TWO_PARTS) else 1)
    return pieces


def _planned_piece(name: str, tensor: Tensor) -> Piece:
    """Return this rank's piece of a weight that is shared by transformers' plan."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return Piece(tensor)
    local = cast(Any, tensor).to_local()
    placement = placements[0]
    # torch's placement of pieces of fused matrices has no public name.
    num_parts = getattr(placement, "split_factor", 1)
    if len(placements) > 1 or not (placement.is_replicate() or hasattr(placement, "dim")):
        raise ModelLoadError(f"{name} is shared as {placements}, which cannot be joined")
    return Piece(local, num_parts)
