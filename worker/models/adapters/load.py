"""Load an adapter from its folder into the layout of a slot, and verify it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ....shared.errors import UnsupportedAdapterError
from ..checks.conformance import tolerance_of
from .files import AdapterFiles, LoadedAdapter
from .peft_folder import LayerMatrices, read_peft_folder
from .slots import AdapterSlots, Prepared

_NUM_ROWS = 3


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
    files = AdapterFiles.read(folder, digest)
    matrices = read_peft_folder(folder, slots.layers, slots.dtype, slots.max_rank)
    files.check_unchanged()
    own_matrices = slots.part_of(matrices)
    prepared = slots.prepare(own_matrices)
    _check_results(slots, prepared, own_matrices)
    return LoadedAdapter(folder, files.digest, max(len(pair.a) for pair in matrices.values()), prepared)


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
