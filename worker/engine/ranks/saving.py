"""Gathers the weights of all ranks, as they are in memory, to save them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from ....shared.errors import EngineStateError
from ...models.loaded import LoadedModel
from ...models.weights.part_state import joined_state, part_path, write_part
from .errors import RankRefusedError
from .messages import WritePart
from .team import FILES_TIMEOUT_S, RankTeam

_FOLDER = "parts-of-ranks"


def gathered_state(
    local: LoadedModel, team: RankTeam, make_module: Callable[[], PreTrainedModel], folder: Path
) -> dict[str, Tensor]:
    """Return the weights as ``Ranks.live_state``: each rank writes its part into ``folder``, and rank 0 joins them.

    Raises:
        RankLostError: a rank is lost.
    """
    parts = folder / _FOLDER
    parts.mkdir()
    try:
        team.together(
            WritePart(str(parts)), lambda: write_part(local, make_module, part_path(parts, 0)), FILES_TIMEOUT_S
        )
        paths = [part_path(parts, rank) for rank in range(1 + len(team.processes))]
        return joined_state(local, make_module, paths)
    except RankRefusedError as error:
        raise EngineStateError(f"the weights cannot be gathered in {folder}: {error}") from error
    finally:
        # Mapped tensors stay valid after their files are removed.
        shutil.rmtree(parts)
