"""Libraries of attention give our results for prompts on a GPU, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.paged_attention import library

from ..paged_cases import make_case, naive

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 3.0}])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("rows", [[(90, 90), (21, 21)], [(9, 300), (6, 6), (130, 150)]], ids=["whole", "later"])
@pytest.mark.parametrize("name", library.LIBRARIES)
def test_results(
    name: str,
    rows: list[tuple[int, int]],
    block_size: int,
    options: dict[str, Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    assert_close: Callable[[Tensor, Tensor], None],
) -> None:
    if name not in library.installed():
        pytest.skip(f"{library.LIBRARIES[name].package} is not installed")
    monkeypatch.setattr(library, "MIN_PROMPT_LEN", 1)
    case = make_case(rows, 4, 2, 64, 64, torch.bfloat16, block_size=block_size)
    try:
        out = case.on(device).attend(scale=0.125, prompt_library=name, **options)
    except RuntimeError as error:
        # Of torch; a start refuses it then, too.
        if not str(error).startswith(("No available kernel", "No viable backend")):
            raise
        pytest.skip(f"{name} does not serve this shape on this GPU")
    assert_close(out.cpu(), naive(case, 0.125, **options))
