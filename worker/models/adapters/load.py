"""An adapter from its folder to what a slot holds, tried out on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ....shared.errors import AdapterFileError, UnsupportedAdapterError
from ....shared.params.adapters import ADAPTER_FILES, adapter_digest
from ....shared.values.shown import shown
from ..checks.conformance import tolerance_of
from .peft_folder import LayerMatrices, read_peft_folder
from .slots import AdapterSlots, Prepared

_NUM_ROWS = 3


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that can be assigned to a slot."""

    digest: str
    rank: int
    prepared: Prepared


@torch.inference_mode()
def load_adapter(folder: Path, digest: str, slots: AdapterSlots) -> LoadedAdapter:
    """Read the adapter in ``folder`` for ``slots``. Touches no slot, so it may run beside a step.

    Each layer is compared with the product of its matrices on random rows.

    Args:
        digest: of the adapter that it should be; "" for whichever it is.

    Raises:
        AdapterFileError: a file is missing or broken, or holds another adapter.
        UnsupportedAdapterError: it is of a kind that is not computed here, or does not fit the model.
    """
    files = _files_of(folder)
    found = adapter_digest(folder)
    if digest and found != digest:
        raise AdapterFileError(
            f"the adapter in {shown(str(folder))} is {found[:12]}…, and the request is for {digest[:12]}…: its files "
            f"have been replaced; put those back, or send the request with the adapter's present name"
        )
    matrices = read_peft_folder(folder, slots.layers, slots.dtype, slots.max_rank)
    if _files_of(folder) != files:
        raise AdapterFileError(
            f"the adapter in {shown(str(folder))} changed while it was read; wait until it is written, and try again"
        )
    prepared = slots.prepare(matrices)
    _check(slots, prepared, matrices)
    return LoadedAdapter(found, max(len(pair.a) for pair in matrices.values()), prepared)


def _files_of(folder: Path) -> list[tuple[int, int, int] | None]:
    """By what a replaced or rewritten file is seen; None for one that is missing, of which others tell."""
    found: list[tuple[int, int, int] | None] = []
    for name in ADAPTER_FILES:
        try:
            stat = (folder / name).stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


def _check(slots: AdapterSlots, prepared: Prepared, matrices: Mapping[str, LayerMatrices]) -> None:
    random = torch.Generator().manual_seed(0)
    tolerance = tolerance_of(slots.dtype)
    for layer, pair in matrices.items():
        inputs = torch.randn(_NUM_ROWS, pair.a.shape[1], generator=random).to(slots.dtype)
        expected = inputs.double() @ pair.a.double().T @ pair.b.double().T
        actual = slots.try_out(prepared, layer, inputs.to(slots.device)).cpu().double()
        error = (actual - expected).norm()
        if not error <= tolerance * expected.norm():
            raise UnsupportedAdapterError(
                f"{layer!r} of the adapter comes out wrong by {error / expected.norm().clamp(min=1e-30):.1%} on this "
                f"engine; merge it into the model instead"
            )
