"""Load an adapter from its folder into the layout of a slot, and verify it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ....shared.errors import AdapterFileError, UnsupportedAdapterError
from ....shared.params.lora import ADAPTER_FILES, adapter_digest
from ....shared.values.shown import shown
from ..checks.conformance import tolerance_of
from .peft_folder import LayerMatrices, read_peft_folder
from .slots import AdapterSlots, Prepared

_NUM_ROWS = 3


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that can be assigned to a slot."""

    folder: Path
    digest: str
    rank: int
    prepared: Prepared


@torch.inference_mode()
def load_adapter(folder: Path, digest: str, slots: AdapterSlots) -> LoadedAdapter:
    """Read the adapter in ``folder`` for ``slots``. It changes no slot, so it may run during a step.

    Each layer is compared with the product of its matrices on random rows.

    Args:
        digest: expected digest of the adapter; "" for any.

    Raises:
        AdapterFileError: a file is missing or broken, or contains another adapter.
        UnsupportedAdapterError: its kind is not supported, or it does not fit the model.
    """
    files = _files_of(folder)
    actual_digest = adapter_digest(folder)
    if digest and actual_digest != digest:
        raise AdapterFileError(
            f"the adapter in {shown(str(folder))} is {actual_digest[:12]}…, and the request is for {digest[:12]}…: its "
            f"files have been replaced; put those back, or send the request with the adapter's present name"
        )
    matrices = read_peft_folder(folder, slots.layers, slots.dtype, slots.max_rank)
    if _files_of(folder) != files:
        raise AdapterFileError(
            f"the adapter in {shown(str(folder))} changed while it was read; wait until it is written, and try again"
        )
    own_matrices = slots.part_of(matrices)
    prepared = slots.prepare(own_matrices)
    _check_results(slots, prepared, own_matrices)
    return LoadedAdapter(folder, actual_digest, max(len(pair.a) for pair in matrices.values()), prepared)


def _files_of(folder: Path) -> list[tuple[int, int, int] | None]:
    """Return inode, size and time of each file, which change when it is replaced or rewritten; None for a missing file,
    which is reported elsewhere.
    """
    states: list[tuple[int, int, int] | None] = []
    for name in ADAPTER_FILES:
        try:
            stat = (folder / name).stat()
            states.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            states.append(None)
    return states


def _check_results(slots: AdapterSlots, prepared: Prepared, matrices: Mapping[str, LayerMatrices]) -> None:
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
